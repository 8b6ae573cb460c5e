"""`/tokenize`: what a request would cost, before it is sent. It is prepared exactly as `/generate` would, and then dropped."""

from __future__ import annotations

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kaminari_core.errors import PromptTooLongError
from kaminari_core.flow import Request
from kaminari_core.serving import Serving
from kaminari_http.app import json_reply
from kaminari_http.native import asked_of
from kaminari_http.wire import TokenizeReply


def routes() -> list[Route]:
    """The route that counts."""
    return [Route("/tokenize", tokenize, methods=["POST"])]


async def tokenize(request: HttpRequest) -> Response:
    """POST /tokenize: the prompt's tokens, what the model would see of the pictures, and whether it fits."""
    _, engine, model, wanted = await asked_of(request)
    return json_reply(await anyio.to_thread.run_sync(_reply, engine, model, wanted))


def _reply(engine: Serving, model: str, wanted: Request) -> TokenizeReply:
    most = engine.config.max_length
    try:
        preview = engine.preview(wanted)
    except PromptTooLongError as error:
        image_tokens = sum(saw.visual_tokens for saw in error.saw)
        return TokenizeReply(model, error.tokens, image_tokens, most, False, 0, error.saw, None)
    room = most - preview.length
    return TokenizeReply(
        model, preview.length, preview.image_tokens, most, True, room, preview.saw, list(preview.tokens)
    )
