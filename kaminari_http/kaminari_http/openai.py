"""`/v1/models` and `/v1/chat/completions` in the shapes that OpenAI's clients expect. `completions.py` and `responses.py` are
views on the same calls.

Handlers raise; the status and the error object are made in `errors.py`. What is ours travels in the extra field `kaminari`,
which those clients ignore.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import UNSET, UnsetType
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kaminari_core.errors import RequestError
from kaminari_core.evidence.facts import GroundedBox
from kaminari_core.evidence.grounding import find_boxes
from kaminari_core.flow import Alternative, Delta, Finished, Request, Result, Token
from kaminari_core.serving import Serving
from kaminari_http.app import Service, json_reply, request_id, service_of
from kaminari_http.body import decode_supported, read_json
from kaminari_http.call import Call, unless_client_leaves
from kaminari_http.requests import Fetched, choices_of, for_task, messages_of, pictures_of, request_of
from kaminari_http.sse import DONE, event, open_stream
from kaminari_http.structured import structure_of
from kaminari_http.unsupported import CHAT
from kaminari_http.wire import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Choice,
    ChoiceLogprobs,
    ChoiceReport,
    ChunkChoice,
    ChunkDelta,
    ModelCard,
    ModelFacts,
    ModelList,
    Options,
    PromptTokensDetails,
    ReplyMessage,
    Report,
    TokenLogprob,
    TopLogprob,
    Usage,
)

Value = TypeVar("Value")
LEAST_LOGPROB = -9999.0
"""What stands for the logarithm of zero, which JSON cannot say; OpenAI's own value."""


def routes() -> list[Route]:
    """The OpenAI routes."""
    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
        Route("/v1/chat/completions", complete_chat, methods=["POST"]),
    ]


def list_models(request: HttpRequest) -> Response:
    """GET /v1/models: what is served, and nothing else."""
    service = service_of(request)
    return json_reply(ModelList([_card(service, name) for name in service.engines]))


def retrieve_model(request: HttpRequest) -> Response:
    """GET /v1/models/{model:path}: one of them."""
    service, name = service_of(request), request.path_params["model"]
    service.engine(name)
    return json_reply(_card(service, name))


def _card(service: Service, name: str) -> ModelCard:
    engine = service.engines[name]
    config = engine.config
    facts = ModelFacts(
        tasks=engine.tasks,
        pictures=engine.shape.image_unit is not None,
        max_length=config.max_length,
        max_tokens=config.max_tokens,
        max_images=config.max_images,
        visual_tokens=config.visual_tokens,
    )
    return ModelCard(name, service.started, facts)


async def complete_chat(request: HttpRequest) -> Response:
    """POST /v1/chat/completions, plain and streamed."""
    asked = await read_json(request, partial(decode_supported, kind=ChatRequest, harmless=CHAT))
    service = service_of(request)
    fetched = await service.fetch(asked.model, pictures_of(asked.messages))
    choices = await run_in_threadpool(_choices, asked, fetched, service.engine(asked.model))
    reply = _Reply.begin(service, asked, choices, request_id(request))
    if asked.stream:
        return await open_stream(reply.call, reply.events(), request.receive)
    try:
        return json_reply(reply.completion(await unless_client_leaves(request.receive, reply.call.results())))
    finally:
        reply.call.cancel()


@dataclass(frozen=True, slots=True)
class _Reply:
    """A chat completion on its way: what was asked for, and the call that answers it."""

    asked: ChatRequest
    call: Call
    id: str
    created: int

    @classmethod
    def begin(cls, service: Service, asked: ChatRequest, choices: Sequence[Request], http_id: str) -> _Reply:
        call = Call.submit(service.engine(asked.model), asked.model, choices, service.metrics, http_id)
        return cls(asked, call, f"chatcmpl-{choices[0].id}", int(time.time()))

    def completion(self, results: Sequence[Result]) -> ChatCompletion:
        """The whole reply."""
        choices = [
            Choice(index, ReplyMessage(result.text), self._logprobs(result.tokens), result.finish_reason)
            for index, result in enumerate(results)
        ]
        report = report_of(dict(enumerate(results)), self.asked)
        return ChatCompletion(self.id, self.created, self.asked.model, choices, usage_of(results, len(results)), report)

    async def events(self) -> AsyncIterator[bytes]:
        """The stream: a role for every choice, the text as it comes, an end for every choice, the usage if asked for."""
        results: dict[int, Result] = {}
        for index in range(len(self.call.requests)):
            yield self._chunk(ChunkChoice(index, ChunkDelta("assistant", "")))
        async for index, each in self.call:
            if isinstance(each, Delta):
                if each.text or (self.asked.logprobs and each.tokens):
                    yield self._chunk(ChunkChoice(index, ChunkDelta(content=each.text), self._logprobs(each.tokens)))
                continue
            assert isinstance(each, Finished), "a call raises its failures"
            results[index] = each.result
            last = ChunkChoice(index, ChunkDelta(), None, each.result.finish_reason)
            yield self._chunk(last, report=report_of({index: each.result}, self.asked))
        if self._wants_usage:
            yield self._chunk(usage=usage_of(list(results.values()), len(results)))
        yield DONE

    def _chunk(self, *choices: ChunkChoice, usage: Usage | None = None, report: Report | None = None) -> bytes:
        chunk = ChatChunk(self.id, self.created, self.asked.model, list(choices), kaminari=report or UNSET)
        if self._wants_usage:
            chunk.usage = usage
        return event(chunk)

    def _logprobs(self, tokens: Sequence[Token]) -> ChoiceLogprobs | None:
        return ChoiceLogprobs([token_logprob(token) for token in tokens]) if self.asked.logprobs else None

    @property
    def _wants_usage(self) -> bool:
        options = self.asked.stream_options
        return options is not None and bool(options.include_usage)


def token_logprob(token: Token) -> TokenLogprob:
    """A generated token in OpenAI's form."""
    assert token.logprob is not None, "the request asked for log-probabilities"
    own = Alternative(token.id, token.logprob, token.text, token.bytes)
    return TokenLogprob(*_logprob(own), [TopLogprob(*_logprob(other)) for other in token.top])


def _logprob(token: Alternative) -> tuple[str, float, list[int]]:
    return token.text, max(token.logprob, LEAST_LOGPROB), list(token.bytes)


def _choices(asked: ChatRequest, fetched: Fetched, engine: Serving) -> list[Request]:
    """One engine request per choice. Raises RequestError and ImageError."""
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if asked.stream_options is not None and not asked.stream:
        raise RequestError("stream_options needs stream to be true.", param="stream_options")
    # The newer name wins; the older is deprecated in OpenAI's API.
    most = asked.max_completion_tokens or asked.max_tokens
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    structure = structure_of(asked, asked.response_format)
    messages = messages_of(asked.messages, fetched, engine.config)
    request = request_of(messages, asked, max_tokens=most, logprobs=logprobs, structure=structure)
    return choices_of(for_task(request, asked.task, engine.tasks), asked.n or 1)


def usage_of(results: Sequence[Result], choices: int) -> Usage:
    """Token counts of results that are `choices` replies to each of one or more prompts: every prompt counts once."""
    prompts = [result.usage for result in results[::choices]]
    prompt, image = sum(usage.prompt_tokens for usage in prompts), sum(usage.image_tokens for usage in prompts)
    generated = sum(result.usage.completion_tokens for result in results)
    return Usage(prompt, generated, prompt + generated, PromptTokensDetails(image))


def report_of(results: dict[int, Result], asked: Options) -> Report:
    """What is ours about the choices with these indices."""
    choices = [
        ChoiceReport(
            index,
            result.finish_detail,
            result.batch_size,
            result.timings,
            given(result.complete),
            given(result.repeat),
            given(result.confidence),
            boxes_of(result, asked),
        )
        for index, result in results.items()
    ]
    return Report(next(iter(results.values())).saw, choices)


def boxes_of(result: Result, asked: Options) -> tuple[GroundedBox, ...] | UnsetType:
    """The boxes in a reply, where they were asked for."""
    return find_boxes(result.text, result.saw) if asked.boxes else UNSET


def given(value: Value | None) -> Value | UnsetType:
    """What there is, or no field."""
    return UNSET if value is None else value
