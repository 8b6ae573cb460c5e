"""`/v1/completions`, the older API without turns: each prompt becomes one user message, to which the chat template is applied."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kaminari_core.errors import RequestError
from kaminari_core.flow import Alternative, Delta, Finished, Message, Request, Result, TextPart, Token
from kaminari_http.app import json_reply, request_id, service_of
from kaminari_http.body import decode_supported, read_json
from kaminari_http.call import Call, unless_client_leaves
from kaminari_http.openai import LEAST_LOGPROB, report_of, usage_of
from kaminari_http.requests import choices_of, in_terms_of, request_of
from kaminari_http.sse import DONE, event, open_stream
from kaminari_http.structured import structure_of
from kaminari_http.unsupported import COMPLETIONS
from kaminari_http.wire import Report, Usage
from kaminari_http.wire_completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest


def routes() -> list[Route]:
    """The route of the older completions."""
    return [Route("/v1/completions", complete, methods=["POST"])]


async def complete(request: HttpRequest) -> Response:
    """POST /v1/completions, plain and streamed."""
    asked = await read_json(request, partial(decode_supported, kind=CompletionRequest, harmless=COMPLETIONS))
    service = service_of(request)
    with in_terms_of("prompt"):
        call = Call.submit(
            service.engine(asked.model), asked.model, _requests(asked), service.metrics, request_id(request)
        )
        reply = _Reply(asked, call)
        if asked.stream:
            return await open_stream(call, reply.events(), request.receive)
        try:
            return json_reply(reply.completion(await unless_client_leaves(request.receive, call.results())))
        finally:
            call.cancel()


def _requests(asked: CompletionRequest) -> list[Request]:
    """One engine request per choice, those of the first prompt first. Raises RequestError."""
    if asked.stream_options is not None and not asked.stream:
        raise RequestError("stream_options needs stream to be true.", param="stream_options")
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    structure = structure_of(asked, asked.response_format)
    requests = []
    for prompt in prompts:
        message = Message("user", (TextPart(prompt),))
        request = request_of(
            (message,), asked, max_tokens=asked.max_tokens, logprobs=asked.logprobs, structure=structure
        )
        requests += choices_of(request, asked.n or 1)
    return requests


@dataclass(slots=True)
class _Reply:
    """A completion on its way."""

    asked: CompletionRequest
    call: Call
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, results: Sequence[Result]) -> Completion:
        """The whole reply."""
        choices = [
            CompletionChoice(index, result.text, self._logprobs(result.tokens, b""), result.finish_reason)
            for index, result in enumerate(results)
        ]
        return self._completion(choices, usage_of(results, self.asked.n or 1), self._report(dict(enumerate(results))))

    async def events(self) -> AsyncIterator[bytes]:
        """The stream: the text as it comes, an end for every choice, the usage if asked for."""
        results: dict[int, Result] = {}
        said = [b""] * len(self.call.requests)
        async for index, each in self.call:
            if isinstance(each, Delta):
                if each.text or (self.asked.logprobs is not None and each.tokens):
                    logprobs = self._logprobs(each.tokens, said[index])
                    said[index] += b"".join(token.bytes for token in each.tokens)
                    yield self._chunk(CompletionChoice(index, each.text, logprobs, None))
                continue
            assert isinstance(each, Finished), "a call raises its failures"
            results[index] = each.result
            last = CompletionChoice(index, "", None, each.result.finish_reason)
            yield self._chunk(last, report=self._report({index: each.result}))
        if self._wants_usage:
            in_order = [results[index] for index in range(len(results))]
            yield self._chunk(usage=usage_of(in_order, self.asked.n or 1))
        yield DONE

    @property
    def _wants_usage(self) -> bool:
        options = self.asked.stream_options
        return options is not None and bool(options.include_usage)

    def _report(self, results: dict[int, Result]) -> Report:
        return report_of(results, self.asked)

    def _chunk(self, *choices: CompletionChoice, usage: Usage | None = None, report: Report | None = None) -> bytes:
        chunk = self._completion(list(choices), None, report)
        chunk.usage = usage if self._wants_usage else UNSET
        return event(chunk)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None, report: Report | None) -> Completion:
        name = f"cmpl-{self.call.requests[0].id}"
        return Completion(name, self.created, self.asked.model, choices, usage=usage, kaminari=report or UNSET)

    def _logprobs(self, tokens: Sequence[Token], before: bytes) -> CompletionLogprobs | None:
        """The log-probabilities of tokens that follow the bytes `before`."""
        if self.asked.logprobs is None:
            return None
        offsets: list[int] = []
        for token in tokens:
            # A character that is not complete yet begins where the last complete one ends.
            offsets.append(len(before.decode(errors="ignore")))
            before += token.bytes
        tops = [{written(other.bytes): _finite(other) for other in token.top} for token in tokens]
        logprobs = [max(token.logprob or 0.0, LEAST_LOGPROB) for token in tokens]
        names = [written(token.bytes) for token in tokens]
        return CompletionLogprobs(names, logprobs, tops if self.asked.logprobs else None, offsets)


def written(data: bytes) -> str:
    """A token's text, or its bytes in OpenAI's notation when they are no text by themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(token: Alternative) -> float:
    return max(token.logprob, LEAST_LOGPROB)
