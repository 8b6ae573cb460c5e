"""The JSON of `/v1/completions`: one prompt or several, no turns, and the older shape of log-probabilities."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from kaminari_http.wire import MOST_CHOICES, Options, Report, StreamOptions, Usage
from kaminari_http.wire_structured import ResponseFormat

MOST_PROMPTS = 64
Prompt = Annotated[str, Meta(min_length=1)]


class CompletionRequest(Options, kw_only=True):
    """The body of `POST /v1/completions`. Keys that are not known are ignored, see also `unsupported.py`."""

    model: str
    prompt: Prompt | Annotated[list[Prompt], Meta(min_length=1, max_length=MOST_PROMPTS)]
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


class CompletionLogprobs(Struct):
    r"""Lists with an entry per token. `text_offset` counts characters of the choice's text.

    A token that is no whole character is written `bytes:\xe6`, one such group a byte.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """One reply, or in a stream a part of one: choice `index` belongs to prompt `index // n`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(Struct):
    """The reply of `POST /v1/completions`, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    kaminari: Report | UnsetType = UNSET
