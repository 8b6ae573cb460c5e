"""The values that flow through the engine, from a request to its result.

    Request -> prepare (worker thread) -> Prepared -> admitted to a slot -> Live -> Delta ... -> Finished(Result) | Failed(error)

Everything here but `Live` is frozen and picklable, so that a front end may live in another process. `Live` (in `live.py`) is
the engine's own mutable record of a request that holds a slot.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from kaminari_core.errors import KaminariError
from kaminari_core.evidence.facts import Confidence, Repeat, Source

if TYPE_CHECKING:
    import torch

    from kaminari_core.structured.structure import Structure

Role = Literal["system", "developer", "user", "assistant", "tool"]
Priority = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length", "cancelled"]
FinishDetail = Literal[
    "end_token", "stop_string", "structure_complete", "loop", "max_tokens", "context_full", "cancelled"
]
NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TextPart:
    """A run of text inside a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """One encoded picture (the bytes of a PNG, JPEG, ... file) inside a message.

    `name` is what errors call it in the sender's terms, such as `messages[0].content[1]` or a file name. `source` is the larger
    file that it was made from, None when it is the file itself.
    """

    data: bytes
    name: str = "image"
    source: Source | None = None


Part = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; parts keep their order, which is the order the model sees."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits of one row.

    The defaults are greedy and change no logits. `temperature` 0 means argmax; `top_k` 0 and `top_p` 1 mean off. Penalties:
    `repetition_penalty` (multiplicative, over prompt and generated tokens, as in transformers), `presence_penalty` and
    `frequency_penalty` (additive, over generated tokens only, as in the OpenAI API). `logit_bias` adds to single tokens.
    `seed` None draws a fresh one. `logprobs` None reports none, 0 the chosen token's, n the n most likely as well.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for. `max_tokens` None means up to the engine's limit for one reply.

    `priority` `batch` is for work nobody waits at: it yields to `interactive` requests. A request that has not ended `timeout`
    seconds after its submission fails with a DeadlineError, wherever it is then; None is no limit.

    `task` names the task of the model that this is, where the prompt does not say it (see `tasks.task_of`). `loop_guard` says
    whether a reply that repeats itself is ended; None leaves it to the engine, which does so in tasks that read. `confidence`
    asks for the log-probability of every token, and for `Result.confidence`.
    """

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    ignore_end: bool = False
    """Go on past end tokens; for benchmarks, which must decode a known number of tokens."""
    structure: Structure | None = None
    """What the text is held to, token by token; see `structured`."""
    priority: Priority = "interactive"
    timeout: float | None = None
    task: str | None = None
    loop_guard: bool | None = None
    confidence: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Saw:
    """What the model really saw of one picture; sizes are (width, height) in pixels.

    `decoded` is the size of the file's own pixels before rotation, `rotation` what made it upright (`none`, `90`, `180`,
    `270` degrees clockwise, with `+mirror` where the EXIF orientation mirrors), `content` the rectangle (left, top, width,
    height) that the picture occupies on `canvas`, `grid` (rows, columns) of visual tokens, and `budget` the number of
    visual tokens that bounded it. `page` of `pages` is which page of its file it is; `source` is the larger file that it was made
    from, None when it is the file itself.
    """

    format: str
    decoded: tuple[int, int]
    rotation: str
    sizing: Literal["bucket", "exact"]
    canvas: tuple[int, int]
    content: tuple[int, int, int, int]
    grid: tuple[int, int]
    visual_tokens: int
    budget: int
    page: int = 1
    pages: int = 1
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Patches:
    """One picture as the vision tower takes it.

    `values` is float32 (t*h*w, channels * temporal_patch * patch * patch) in merge-block-major order; `grid` is (t, h, w) in
    patches.
    """

    values: torch.Tensor
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request turned into model inputs on the CPU.

    `tokens` are the prompt's ids with image placeholders expanded; `positions` is int64 (axes, length), the rotary positions
    of the prompt (three equal-length rows for M-RoPE, one for plain rope); `next_position` the rotary position of the first
    generated token. `seconds` is the time that preparing took.
    """

    request: Request
    tokens: tuple[int, ...]
    positions: torch.Tensor
    next_position: int
    patches: tuple[Patches, ...] = ()
    saw: tuple[Saw, ...] = ()
    seconds: float = 0.0

    @property
    def length(self) -> int:
        """Number of prompt tokens, which is the number of cache positions that prefill fills."""
        return len(self.tokens)

    @property
    def image_tokens(self) -> int:
        """How many of the prompt tokens stand for pictures."""
        return sum(saw.visual_tokens for saw in self.saw)


@dataclass(frozen=True, slots=True)
class Preview:
    """What a request would cost: its prompt's token ids with placeholders expanded, and what would be seen of its pictures."""

    tokens: tuple[int, ...]
    saw: tuple[Saw, ...]

    @property
    def length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens)

    @property
    def image_tokens(self) -> int:
        """How many of the prompt tokens stand for pictures."""
        return sum(saw.visual_tokens for saw in self.saw)


@dataclass(frozen=True, slots=True)
class Embedded:
    """A prompt on the device, ready to be run through the decoder layers in chunks.

    `hidden` is (length, hidden size); `positions` int64 (axes, length); `after_layer[k]`, (length, hidden size), is added to
    the hidden state right after decoder layer k (Qwen3-VL's deepstack) and is zero where nothing is to be added. `following`,
    (length - 1, hidden size), is what a draft head gets as the next token at each position but the last, None without one.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    after_layer: Mapping[int, torch.Tensor] = field(default_factory=dict)
    following: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token with its log-probability (natural logarithm) under the unmodified logits.

    `bytes` are the token's own bytes, which may be part of a character; `text` is their lossy decoding.
    """

    token: int
    logprob: float
    text: str
    bytes: bytes


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `logprob` and `top` are filled when the request asked for log-probabilities or confidence."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None = None
    top: tuple[Alternative, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        # Sent between processes at every step, where what a dataclass with slots does by itself is slow.
        return Token, (self.id, self.text, self.bytes, self.logprob, self.top)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `image_tokens` are part of `prompt_tokens`."""

    prompt_tokens: int
    image_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative decoding of one request: tokens that were guessed, and how many of them the model then chose."""

    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in seconds.

    `prepare` runs in a worker; `queue` is from prepared to admitted, and `window` the part of it in which the scheduler held
    the request back on purpose, for others to join its batch; `prefill` includes the vision tower; `ttft` is from
    submission to the first token; `decode` is from the first token to the last, `sampling` and `finalize` (detokenizing, stop
    strings, events) are this row's share of it; `total` is from submission to the end. `memory` is the peak number of bytes of
    the device allocator (CUDA) or of the process (CPU).
    """

    prepare: float
    queue: float
    prefill: float
    ttft: float
    decode: float
    sampling: float
    finalize: float
    total: float
    tokens_per_s: float
    images_per_s: float
    memory: int
    window: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """The whole reply to one request.

    `repeat` is the loop that was cut off where `finish_detail` is `loop`: `text` and `tokens` end with its first copy, while
    `usage` counts all tokens that were generated. `confidence` is there when the request asked for it.
    """

    request_id: str
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    finish_detail: FinishDetail
    usage: Usage
    timings: Timings
    saw: tuple[Saw, ...]
    batch_size: int
    """The largest number of rows that were decoded together with this one, itself included."""
    drafts: Drafts = Drafts()
    batch_id: int | None = None
    """Requests that were admitted by the same answer of the scheduler share it. None for one that was never admitted."""
    complete: bool | None = None
    """Whether `text` has the structure that the request asked for; None where it asked for none. Only a limit, a stop string or
    a cancel can make it False."""
    repeat: Repeat | None = None
    confidence: Confidence | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one request.

    `text` never ends inside a character and never holds the beginning of a stop string, so it may be empty while `tokens` is
    not; the last delta of a request may carry held-back text and no token. Where loops are watched for, text and tokens that may
    be a loop are held back together. Deltas joined equal the result's text, and their tokens the result's.
    """

    request_id: str
    text: str
    tokens: tuple[Token, ...]

    def __reduce__(self) -> tuple[object, ...]:
        # See Token.
        return Delta, (self.request_id, self.text, self.tokens)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request that was served (or cancelled, see `finish_reason`)."""

    request_id: str
    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that was not served."""

    request_id: str
    error: KaminariError


Event = Delta | Finished | Failed
