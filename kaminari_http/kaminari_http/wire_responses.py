"""The JSON of `/v1/responses`, OpenAI's newer API: items in, items out, and named events.

Fields of the reply that are always the same say what is not supported here; OpenAI's clients want them to be there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from kaminari_http.wire import Count, Options, Report, TokenLogprob
from kaminari_http.wire_structured import PlainFormat, TextFormat, TextSettings

InputRole = Literal["user", "assistant", "system", "developer"]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, tag_field="type", tag="input_text"):
    """`{"type": "input_text", "text": ...}`."""

    text: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    """`{"type": "input_image", "image_url": ...}`. `detail` is accepted and has no effect."""

    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputFile(Struct, tag_field="type", tag="input_file"):
    """`{"type": "input_file", "file_data": ...}` or one with `file_url`: the pages of a document become pictures, in order."""

    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    file_id: str | None = None


class OutputTextInput(Struct, tag_field="type", tag="output_text"):
    """What the model said in an earlier reply, sent back as it came."""

    text: str


class InputItem(Struct):
    """One turn."""

    role: InputRole
    content: str | list[InputText | InputImage | InputFile | OutputTextInput]
    type: Literal["message"] = "message"


class ResponsesRequest(Options, kw_only=True):
    """The body of `POST /v1/responses`. Keys that are not known are ignored, see also `unsupported.py`."""

    model: str
    task: str | None = None
    input: Annotated[str, Meta(min_length=1)] | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    text: TextSettings | None = None


class OutputText(Struct):
    """The text of a reply."""

    text: str = ""
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputMessage(Struct):
    """The one item of a reply."""

    id: str
    status: Status
    content: list[OutputText]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class InputDetails(Struct):
    """Nothing is cached here. `image_tokens` are part of the input tokens."""

    image_tokens: int
    cached_tokens: int = 0


class OutputDetails(Struct):
    """Reasoning is not told apart."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why a reply ends early: it has as many tokens as it may have."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Reasoning(Struct):
    """Not supported."""

    effort: None = None
    summary: None = None


class ReplyText(Struct):
    """The format that was asked for, which is plain text unless one was."""

    format: TextFormat = field(default_factory=PlainFormat)


class ResponseObject(Struct, kw_only=True):
    """The reply of `POST /v1/responses`."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[OutputMessage] = field(default_factory=list)
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    metadata: dict[str, str]
    object: Literal["response"] = "response"
    error: None = None
    background: bool = False
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: Reasoning = field(default_factory=Reasoning)
    service_tier: Literal["default"] = "default"
    store: bool = False
    text: ReplyText = field(default_factory=ReplyText)
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    kaminari: Report | UnsetType = UNSET


class ResponseEvent(Struct, kw_only=True):
    """One event of a streamed response; which of the fields are there depends on `type`, as in OpenAI's documents."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputMessage | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
