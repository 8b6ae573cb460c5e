"""`/generate` and `/generate_stream`: a prompt and pictures in, everything the engine knows about the reply out."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial

from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kaminari_core.errors import RequestError
from kaminari_core.flow import Delta, Finished, Message, Part, Request, Result, TextPart, Token
from kaminari_core.serving import Serving
from kaminari_http.app import json_reply, request_id, service_of
from kaminari_http.body import decode, read_json
from kaminari_http.call import Call, unless_client_leaves
from kaminari_http.openai import boxes_of, given, token_logprob
from kaminari_http.requests import Fetched, image_of, messages_of, pictures_of, request_of, task_prompt
from kaminari_http.sse import event, open_stream
from kaminari_http.structured import structure_of_generate
from kaminari_http.wire import GenerateReply, GenerateRequest, GenerateUsage, Metrics, StreamToken, TokenEvent

DEFAULT_TASK = "ocr"
"""What is done with pictures that come without a prompt and a task, as in `kaminari run`."""


def routes() -> list[Route]:
    """The native routes."""
    return [
        Route("/generate", generate, methods=["POST"]),
        Route("/generate_stream", generate_stream, methods=["POST"]),
    ]


async def generate(request: HttpRequest) -> Response:
    """POST /generate: the whole reply at once."""
    asked, call = await _begin(request)
    try:
        [result] = await unless_client_leaves(request.receive, call.results())
    finally:
        call.cancel()
    return json_reply(_reply(asked, call, result))


async def generate_stream(request: HttpRequest) -> Response:
    """POST /generate_stream: an event per token, then one with the whole reply."""
    asked, call = await _begin(request)
    return await open_stream(call, _events(asked, call), request.receive)


async def _begin(request: HttpRequest) -> tuple[GenerateRequest, Call]:
    asked, engine, model, wanted = await asked_of(request)
    return asked, Call.submit(engine, model, [wanted], service_of(request).metrics, request_id(request))


async def asked_of(request: HttpRequest) -> tuple[GenerateRequest, Serving, str, Request]:
    """The body, the engine, its served name, and the engine's request that the body means. Raises RequestError and ImageError."""
    asked = await read_json(request, partial(decode, kind=GenerateRequest))
    service = service_of(request)
    model = next(iter(service.engines), "") if asked.model is None else asked.model
    engine = service.engine(model)
    fetched = await service.fetch(model, _pictures(asked))
    return asked, engine, model, await run_in_threadpool(_request, asked, engine, fetched)


def _pictures(asked: GenerateRequest) -> Iterator[tuple[str, str]]:
    yield from pictures_of(asked.messages or [])
    yield from ((url, f"images[{index}]") for index, url in enumerate(asked.images or []))


def _request(asked: GenerateRequest, engine: Serving, fetched: Fetched) -> Request:
    messages = _messages(asked, engine, fetched)
    structure = structure_of_generate(asked)
    request = request_of(messages, asked, max_tokens=asked.max_tokens, logprobs=asked.logprobs, structure=structure)
    return dataclasses.replace(request, task=asked.task)


def _messages(asked: GenerateRequest, engine: Serving, fetched: Fetched) -> tuple[Message, ...]:
    """The conversation that was sent, or one turn of the pictures, then the prompt or the task's."""
    if asked.messages is not None:
        if any(field is not None for field in (asked.prompt, asked.task, asked.template, asked.images)):
            raise RequestError("Send either messages or a prompt, task and images, not both.", param="messages")
        return messages_of(asked.messages, fetched, engine.config)
    parts: list[Part] = [image_of(url, f"images[{index}]", fetched) for index, url in enumerate(asked.images or [])]
    return (Message("user", (*parts, TextPart(_prompt(asked, engine.tasks)))),)


def _prompt(asked: GenerateRequest, tasks: Mapping[str, str]) -> str:
    if asked.prompt is not None and asked.task is not None:
        raise RequestError("Send either a prompt or a task, not both.", param="task")
    if asked.prompt is not None:
        if asked.template is not None:
            raise RequestError("A template belongs to a task, not to a prompt.", param="template")
        return asked.prompt
    if asked.task is None and not asked.images:
        known = ", ".join(sorted(tasks)) or "none"
        raise RequestError(f"Send a prompt, a task or messages. This model's tasks: {known}.", param="prompt")
    return task_prompt(tasks, asked.task or DEFAULT_TASK, asked.template)


async def _events(asked: GenerateRequest, call: Call) -> AsyncIterator[bytes]:
    index = 0
    async for _, each in call:
        if isinstance(each, Delta):
            for token_event in _token_events(each, index):
                yield event(token_event)
            index += len(each.tokens)
            continue
        assert isinstance(each, Finished), "a call raises its failures"
        reply = _reply(asked, call, each.result)
        reply.done = True
        yield event(reply)


def _token_events(delta: Delta, index: int) -> list[TokenEvent]:
    """One event per token; the text belongs to the last of them, which made it certain."""
    if not delta.tokens:
        return [TokenEvent(index, None, delta.text)] if delta.text else []
    *before, last = delta.tokens
    events = [TokenEvent(index + offset, _token(token), "") for offset, token in enumerate(before)]
    return [*events, TokenEvent(index + len(before), _token(last), delta.text)]


def _token(token: Token) -> StreamToken:
    return StreamToken(token.id, token.text, UNSET if token.logprob is None else token.logprob)


def metrics_of(result: Result) -> Metrics:
    """Everything the engine measured about a request."""
    return Metrics(
        **dataclasses.asdict(result.timings),
        batch_size=result.batch_size,
        batch_id=result.batch_id,
        drafts_proposed=result.drafts.proposed,
        drafts_accepted=result.drafts.accepted,
    )


def _reply(asked: GenerateRequest, call: Call, result: Result) -> GenerateReply:
    usage = result.usage
    return GenerateReply(
        request_id=call.http_id,
        model=call.model,
        text=result.text,
        finish_reason=result.finish_reason,
        finish_detail=result.finish_detail,
        complete=given(result.complete),
        repeat=given(result.repeat),
        usage=GenerateUsage(
            usage.prompt_tokens,
            usage.image_tokens,
            usage.completion_tokens,
            usage.prompt_tokens + usage.completion_tokens,
        ),
        saw=result.saw,
        metrics=metrics_of(result),
        logprobs=UNSET
        if call.requests[0].sampling.logprobs is None
        else [token_logprob(token) for token in result.tokens],
        confidence=given(result.confidence),
        boxes=boxes_of(result, asked),
    )
