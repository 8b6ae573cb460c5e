"""The JSON that travels: what the chat and the native routes take and return.

msgspec checks types and ranges while it parses, and `/openapi.json` is made from these classes. Nothing here knows an engine;
what a request means to the engine is in `requests.py` and in the module of each route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kaminari_core.evidence.facts import Confidence, GroundedBox, Repeat
from kaminari_core.flow import Priority, Role, Saw, Timings
from kaminari_http.wire_structured import Choices, Pattern, ResponseFormat, StructuredOutputs

MOST_CHOICES = 8
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
StopString = Annotated[str, Meta(min_length=1)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]


class TextContent(Struct, tag_field="type", tag="text"):
    """`{"type": "text", "text": ...}`."""

    text: str


class ImageUrl(Struct):
    """The object form of `image_url`. `detail` is accepted and has no effect: the engine's own budget decides."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImageContent(Struct, tag_field="type", tag="image_url"):
    """`{"type": "image_url", "image_url": {"url": ...}}`, or the short form with the URL itself."""

    image_url: str | ImageUrl

    @property
    def url(self) -> str:
        """The URL of either form."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class FileData(Struct):
    """The object form of a file. `file_data` is a data: URL or bare base64; `file_id` is refused, for no files are kept here."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class FileContent(Struct, tag_field="type", tag="file"):
    """`{"type": "file", "file": {"file_data": "data:application/pdf;base64,..."}}`: its pages become pictures, in order."""

    file: FileData


class ChatMessage(Struct):
    """One turn. `content` may be absent only where an assistant's turn has `tool_calls`, which the model is not shown."""

    role: Role
    content: str | list[TextContent | ImageContent | FileContent] | None = None
    tool_calls: list[Any] | None = None


class Options(Struct, kw_only=True):
    """The generation options that every route shares. None means the default.

    `confidence` and `boxes` ask for what the field `kaminari` then says about the reply; `loop_guard` says whether a reply that
    repeats itself is ended. `regex` and those below it say what the reply is held to; see `structured.py`.
    """

    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    logit_bias: dict[int, Bias] | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    confidence: bool | None = None
    boxes: bool | None = None
    loop_guard: bool | None = None
    regex: Pattern | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None


class StreamOptions(Struct):
    """`stream_options` of a chat completion."""

    include_usage: bool | None = None


class ChatRequest(Options, kw_only=True):
    """The body of `POST /v1/chat/completions`. Keys that are not known are ignored, see also `unsupported.py`.

    `task` names one of the model's tasks; a last message of pictures only gets its prompt.
    """

    model: str
    messages: list[ChatMessage]
    task: str | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None


class GenerateRequest(Options, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /generate`, `POST /generate_stream` and `POST /tokenize`. A key that is not known is an error.

    `strict` holds the reply to the shape of the `template`.
    """

    model: str | None = None
    prompt: str | None = None
    task: str | None = None
    template: dict[str, Any] | None = None
    strict: bool | None = None
    images: list[str] | None = None
    messages: list[ChatMessage] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None


class TopLogprob(Struct):
    """One likely token at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token at a position, with the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct):
    """`logprobs` of a choice."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptTokensDetails(Struct):
    """Image tokens are part of the prompt tokens."""

    image_tokens: int


class Usage(Struct):
    """Token counts: the prompt once, the completions of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChoiceReport(Struct):
    """What kaminari adds about one choice; timings in seconds, memory in bytes.

    `complete` is there where a structure was asked for: whether the text has it. A limit or a stop string can cut it. `repeat` is
    there where the reply was a loop, `confidence` and `boxes` where they were asked for.
    """

    index: int
    finish_detail: str
    batch_size: int
    timings: Timings
    complete: bool | UnsetType = UNSET
    repeat: Repeat | UnsetType = UNSET
    confidence: Confidence | UnsetType = UNSET
    boxes: tuple[GroundedBox, ...] | UnsetType = UNSET


class Report(Struct):
    """The field `kaminari` of a reply: what the model saw of each picture, and where the time went."""

    saw: tuple[Saw, ...]
    choices: list[ChoiceReport]


class ReplyMessage(Struct):
    """`message` of a choice."""

    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(Struct):
    """One reply of a chat completion."""

    index: int
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(Struct):
    """The reply of `POST /v1/chat/completions` without `stream`."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    kaminari: Report
    object: str = "chat.completion"


class ChunkDelta(Struct, omit_defaults=True):
    """`delta` of a chunk; empty in the last one."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(Struct):
    """One choice's part of a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct):
    """One event of a streamed chat completion. `usage` is absent, null or, in the last chunk, filled, as was asked for."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    kaminari: Report | UnsetType = UNSET


class ModelFacts(Struct):
    """What kaminari adds about a model: its tasks with their prompts, and its limits in tokens and pictures."""

    tasks: Mapping[str, str]
    pictures: bool
    max_length: int
    max_tokens: int
    max_images: int
    visual_tokens: int


class ModelCard(Struct):
    """One entry of `GET /v1/models`."""

    id: str
    created: int
    kaminari: ModelFacts
    object: str = "model"
    owned_by: str = "kaminari"


class ModelList(Struct):
    """The reply of `GET /v1/models`."""

    data: list[ModelCard]
    object: str = "list"


class GenerateUsage(Struct):
    """Token counts; image tokens are part of the prompt tokens."""

    prompt_tokens: int
    image_tokens: int
    completion_tokens: int
    total_tokens: int


class Metrics(Struct, kw_only=True):
    """`metrics` of a reply: timings in seconds, memory in bytes, the batch it was admitted in, the largest it was decoded in.

    `window` is the part of `queue` in which the scheduler held the request back for others to join it.
    """

    prepare: float
    queue: float
    window: float
    prefill: float
    ttft: float
    decode: float
    sampling: float
    finalize: float
    total: float
    tokens_per_s: float
    images_per_s: float
    memory: int
    batch_size: int
    batch_id: int | None
    drafts_proposed: int
    drafts_accepted: int


class GenerateReply(Struct, kw_only=True):
    """The reply of `POST /generate`, and with `done` the last event of `POST /generate_stream`.

    `complete`, `repeat`, `confidence` and `boxes` are as in ChoiceReport.
    """

    done: bool | UnsetType = UNSET
    request_id: str
    model: str
    text: str
    finish_reason: str
    finish_detail: str
    complete: bool | UnsetType = UNSET
    repeat: Repeat | UnsetType = UNSET
    usage: GenerateUsage
    saw: tuple[Saw, ...]
    metrics: Metrics
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    confidence: Confidence | UnsetType = UNSET
    boxes: tuple[GroundedBox, ...] | UnsetType = UNSET


class StreamToken(Struct):
    """A token of `POST /generate_stream`; its text is lossy where the token is part of a character."""

    id: int
    text: str
    logprob: float | UnsetType = UNSET


class TokenEvent(Struct):
    """One event of `POST /generate_stream`: the text that became certain with a token, or without one at the end."""

    index: int
    token: StreamToken | None
    text: str


class TokenizeReply(Struct):
    """The reply of `POST /tokenize`. `room` is for the reply, in tokens; `tokens` is null when the prompt does not fit."""

    model: str
    count: int
    image_tokens: int
    max_model_len: int
    fits: bool
    room: int
    saw: tuple[Saw, ...]
    tokens: list[int] | None
