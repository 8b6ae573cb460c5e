"""`/v1/responses`, OpenAI's newer API, without a memory: nothing is stored, so every request carries the whole conversation."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kaminari_core.config import EngineConfig
from kaminari_core.errors import RequestError
from kaminari_core.flow import Delta, Finished, Message, Part, Request, Result, TextPart, Token
from kaminari_core.serving import Serving
from kaminari_http.app import json_reply, request_id, service_of
from kaminari_http.body import decode_supported, read_json
from kaminari_http.call import Call, unless_client_leaves
from kaminari_http.files import file_url, pages_of_url
from kaminari_http.openai import report_of, token_logprob
from kaminari_http.requests import Fetched, for_task, image_of, in_terms_of, request_of
from kaminari_http.sse import named_event, open_stream
from kaminari_http.structured import structure_of
from kaminari_http.unsupported import RESPONSES
from kaminari_http.wire import TokenLogprob
from kaminari_http.wire_responses import (
    IncompleteDetails,
    InputDetails,
    InputFile,
    InputImage,
    InputItem,
    OutputDetails,
    OutputMessage,
    OutputText,
    ReplyText,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
)


def routes() -> list[Route]:
    """The route of responses."""
    return [Route("/v1/responses", respond, methods=["POST"])]


async def respond(request: HttpRequest) -> Response:
    """POST /v1/responses, plain and streamed."""
    asked = await read_json(request, partial(decode_supported, kind=ResponsesRequest, harmless=RESPONSES))
    service = service_of(request)
    engine, fetched = service.engine(asked.model), await service.fetch(asked.model, _pictures(asked))
    with in_terms_of("input"):
        wanted = await run_in_threadpool(_request, asked, fetched, engine)
        call = Call.submit(engine, asked.model, [wanted], service.metrics, request_id(request))
        reply = _Reply(asked, call)
        if asked.stream:
            return await open_stream(call, reply.events(), request.receive)
        try:
            [result] = await unless_client_leaves(request.receive, call.results())
        finally:
            call.cancel()
    return json_reply(reply.complete(result))


def _pictures(asked: ResponsesRequest) -> Iterator[tuple[str, str]]:
    for index, item in enumerate(asked.input if isinstance(asked.input, list) else ()):
        for number, part in enumerate(item.content if isinstance(item.content, list) else ()):
            if isinstance(part, InputImage):
                yield part.image_url, f"input[{index}].content[{number}]"
            elif isinstance(part, InputFile) and part.file_url is not None:
                yield part.file_url, f"input[{index}].content[{number}]"


def _request(asked: ResponsesRequest, fetched: Fetched, engine: Serving) -> Request:
    """The engine's request. Raises RequestError and ImageError."""
    if asked.top_logprobs is not None and not asked.include:
        raise RequestError('top_logprobs needs include to be ["message.output_text.logprobs"].', param="top_logprobs")
    logprobs = (asked.top_logprobs or 0) if asked.include else None
    structure = structure_of(asked, None if asked.text is None else asked.text.format, "text.format")
    messages = _messages(asked, fetched, engine.config)
    request = request_of(messages, asked, max_tokens=asked.max_output_tokens, logprobs=logprobs, structure=structure)
    return for_task(request, asked.task, engine.tasks)


def _messages(asked: ResponsesRequest, fetched: Fetched, config: EngineConfig) -> tuple[Message, ...]:
    """The conversation, the instructions before everything else."""
    if isinstance(asked.input, str):
        turns = [Message("user", (TextPart(asked.input),))]
    else:
        turns = [_message(item, f"input[{index}]", fetched, config) for index, item in enumerate(asked.input)]
    if not any(turn.role == "user" for turn in turns):
        raise RequestError("input holds no user message, so there is nothing to reply to.", param="input")
    if asked.instructions:
        # Templates have one place for a system message.
        first = turns.pop(0).parts if turns[0].role in ("system", "developer") else ()
        break_between = (TextPart("\n\n"),) if first else ()
        turns.insert(0, Message("system", (TextPart(asked.instructions), *break_between, *first)))
    return tuple(turns)


def _message(item: InputItem, place: str, fetched: Fetched, config: EngineConfig) -> Message:
    if isinstance(item.content, str):
        return Message(item.role, (TextPart(item.content),))
    if not item.content and item.role != "assistant":
        raise RequestError(f"{place} has no content; send a string or a list of parts.", param=f"{place}.content")
    parts: list[Part] = []
    for index, part in enumerate(item.content):
        if isinstance(part, InputImage):
            parts.append(image_of(part.image_url, f"{place}.content[{index}]", fetched))
        elif isinstance(part, InputFile):
            within = f"{place}.content[{index}]"
            parts += pages_of_url(
                file_url(part.file_data, part.file_url, part.file_id, within), within, fetched, config
            )
        else:
            parts.append(TextPart(part.text))
    return Message(item.role, tuple(parts))


@dataclass(slots=True)
class _Reply:
    """A response on its way: one message with one text."""

    asked: ResponsesRequest
    call: Call
    created: int = field(default_factory=lambda: int(time.time()))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def complete(self, result: Result) -> ResponseObject:
        """The whole reply."""
        status: Status = "incomplete" if result.finish_reason == "length" else "completed"
        reply = self._response(status)
        reply.output = [self._message(status, OutputText(result.text, logprobs=self._logprobs(result.tokens)))]
        reply.incomplete_details = IncompleteDetails() if status == "incomplete" else None
        used = result.usage
        reply.usage = ResponseUsage(
            used.prompt_tokens,
            InputDetails(used.image_tokens),
            used.completion_tokens,
            OutputDetails(),
            used.prompt_tokens + used.completion_tokens,
        )
        reply.kaminari = report_of({0: result}, self.asked)
        return reply

    async def events(self) -> AsyncIterator[bytes]:
        """The stream: the response and its item and part are opened, the text comes, all of them are closed."""
        place: dict[str, Any] = {"item_id": self._message("in_progress").id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress"))
        yield self._event("response.content_part.added", **place, part=OutputText())
        async for _, each in self.call:
            if isinstance(each, Delta):
                if each.text or (self.asked.include and each.tokens):
                    logprobs = self._logprobs(each.tokens)
                    yield self._event("response.output_text.delta", **place, delta=each.text, logprobs=logprobs)
                continue
            assert isinstance(each, Finished), "a call raises its failures"
            reply = self.complete(each.result)
            [item] = reply.output
            [part] = item.content
            yield self._event("response.output_text.done", **place, text=part.text, logprobs=part.logprobs)
            yield self._event("response.content_part.done", **place, part=part)
            yield self._event("response.output_item.done", output_index=0, item=item)
            yield self._event(f"response.{reply.status}", response=reply)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event(kind, ResponseEvent(type=kind, sequence_number=next(self._numbers), **fields))

    def _response(self, status: Status) -> ResponseObject:
        asked, sampling = self.asked, self.call.requests[0].sampling
        return ResponseObject(
            id=f"resp_{self.call.requests[0].id}",
            created_at=self.created,
            status=status,
            model=asked.model,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_logprobs=asked.top_logprobs or 0,
            metadata=asked.metadata or {},
            text=ReplyText() if asked.text is None or asked.text.format is None else ReplyText(asked.text.format),
        )

    def _message(self, status: Status, *content: OutputText) -> OutputMessage:
        return OutputMessage(f"msg_{self.call.requests[0].id}", status, list(content))

    def _logprobs(self, tokens: Sequence[Token]) -> list[TokenLogprob]:
        return [token_logprob(token) for token in tokens] if self.asked.include else []
