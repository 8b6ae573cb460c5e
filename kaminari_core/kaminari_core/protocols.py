"""What the engine asks of the things that plugins bring: ordinary objects, called directly, typed by these protocols.

The seam lies where the engine stops knowing the architecture. Everything about prompts, pictures and layers belongs to a
`Model`; which request runs when belongs to a `Scheduler`; where keys and values lie belongs to a `Cache`; the engine moves
requests between them and owns the device thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kaminari_core.flow import Embedded, Prepared, Priority, Request, Sampling

if TYPE_CHECKING:
    from kaminari_core.quantization.scheme import Codes, Scheme

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)` while something long runs."""

LayerCall = Callable[..., Tensor]
"""Called as `layer_call(layer, *arguments)`; runs `layer.decode(*arguments)` eagerly or compiled."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that the engine, the cache and the memory plan need.

    `max_positions` is the longest sequence the model supports; `end_tokens` all ids that end a reply; `image_unit` the side of
    one visual token in pixels and `min_visual_tokens` the fewest tokens of one picture, both None for a text-only model.
    `draft_layers` counts the layers of a draft head, whose keys and values lie behind those of the decoder layers; 0 without
    one, or when it is not used.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    end_tokens: tuple[int, ...]
    image_unit: int | None = None
    min_visual_tokens: int | None = None
    draft_layers: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of one decode step for `rows` live rows of `width` new tokens each (width 1 where no drafts are verified).

    `tokens` and `positions` (rotary) are int64 (rows, width). `cursors`, int64 (rows, width), are the cache positions that
    the new keys and values are written to; a query sees the keys at positions up to its own cursor. `length` bounds what is
    read: all live cursors are below it; 0 where all attention of the model reads each row as far as its cursor, and needs no
    bound (see `layers.attends_by_cursors`). A row of the batch bucket that holds no request has its cursor at the cache's spare
    last position, so that it never touches what a request has stored.
    """

    tokens: Tensor
    positions: Tensor
    cursors: Tensor
    length: int


@runtime_checkable
class Cache(Protocol):
    """Keys and values at fixed addresses, one row per slot.

    `keys` and `values` are (layers + draft layers, slots, kv_heads, max_length + 1, head_dim); the last position is spare (see
    `Step`). `state` is (slots, widest step, hidden) where there is a draft head, which continues from it, else None.
    """

    keys: Tensor
    values: Tensor
    state: Tensor | None
    slots: int
    max_length: int

    def claim(self) -> int:
        """Take the lowest free slot."""
        ...

    def release(self, slot: int) -> None:
        """Give a slot back. Its contents are left as they are and never read again."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to the free slot `target`, claim that and release `source`."""
        ...

    @property
    def free(self) -> int:
        """How many slots are free."""
        ...


class Detokenizer(Protocol):
    """Turns the ids of one reply into text, a token at a time."""

    def push(self, token: int) -> str:
        """Take one token and return the text that is now certain: whole characters only, possibly empty."""
        ...

    def flush(self) -> str:
        """Return what is held back at the end; bytes that are no character become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to the text; empty for special tokens."""
        ...


class Model(Protocol):
    """One loaded architecture. `prepare` runs in worker threads, everything else in the engine thread.

    Where a model has an attribute `network`, a torch module with all that it computes with, its linear layers and its attention
    are replaced by those for this processor when it is loaded (see `kernels.adoption`).
    """

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    sampling_defaults: Sampling
    """What the checkpoint's own generation settings ask for."""

    def prepare(self, request: Request) -> Prepared:
        """Check a request and turn it into model inputs. Raises RequestError with the `param` at fault."""
        ...

    def embed(self, prepared: Prepared) -> Embedded:
        """Run the vision tower and look up the embeddings of the whole prompt."""
        ...

    def prefill(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> Tensor:
        """Run prompt positions [start, stop) through the layers, storing keys and values in the slot's row.

        Positions below `start` are already there. Returns the logits of position stop - 1 as (vocabulary,); nobody reads them
        unless that is the prompt's last, so for other chunks they may be empty.
        """
        ...

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> Tensor:
        """Run one step for all rows: pure, fixed shapes, no host synchronization. Returns logits (rows, width, vocabulary).

        `layer_call(layer, *arguments)` is how each repeated layer must be called; it runs `layer.decode(*arguments)`.
        """
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one reply."""
        ...


class DraftingModel(Model, Protocol):
    """A model with a draft head. Its prefill and decode leave the last hidden states in `cache.state` where that is not None:
    prefill that of the last position at index 0, decode those of its whole width.
    """

    def draft(self, step: Step, ends: Tensor, cache: Cache, layer_call: LayerCall) -> Tensor:
        """Run the draft head; returns the logits (rows, vocabulary) of each row at its index `ends`, int64 (rows).

        Token i of a row follows the hidden state i of `cache.state`; the cursors are the positions of those states. The head's
        own hidden state at `ends` is left at index 0 of `cache.state`, from where a chained step goes on.
        """
        ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a scheduler may know of a request that waits; `since` is time.monotonic() when it was ready."""

    id: str
    since: float
    prompt_tokens: int
    priority: Priority = "interactive"


@dataclass(frozen=True, slots=True)
class Group:
    """A scheduler's answer: start these ids as one batch. All are prefilled, one by one, before any of them is decoded."""

    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Later:
    """A scheduler's answer: start nothing now, and ask again at `at` (time.monotonic()), or when something changes."""

    at: float


class Scheduler(Protocol):
    """Answers which waiting requests may start. It never sees slots, cache or model.

    It is asked before every step while there is both a request that waits and a free slot. While nothing runs there are no
    steps: then it is asked again when a request arrives or leaves, and at the time a `Later` names.
    """

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str] | Group | Later:
        """The ids to start now, in order, at most `free` of them. `waiting` is in order of arrival, `now` is time.monotonic()."""
        ...


ScaleSearch = Literal["rtn", "mse", "activation"]


class Quantizer(Protocol):
    """Chooses the codes of linear layers' weights, ahead of time. How they are stored, loaded and multiplied is the core's.

    `bits`, 4 or 8, is what a code has to fit in.
    """

    bits: int

    def quantize(self, weight: Tensor, scheme: Scheme, search: ScaleSearch, inputs: Tensor | None) -> Codes:
        """Codes, scales and zero points for some rows (N, K) of a weight, of any float type.

        Rows are handed over in pieces, so each must be treated by itself. `search` is what the user asked for: `rtn` rounds to
        nearest over the whole range of a group, `mse` looks for the scale with the least squared error of the weight,
        `activation` for codes with little error of the layer's output: `inputs`, float32 (samples, K), are some of its inputs
        on calibration pages, and None for the other two. Raises UsageError for a search that this quantizer does not have.
        """
        ...


ReferenceMode = Literal["dynamic", "static"]


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Greedy decoding by the stock implementation: `logits` float32 (steps, vocabulary) or None, and where the time went."""

    tokens: tuple[int, ...]
    logits: Tensor | None
    prefill_seconds: float
    decode_seconds: float


class Reference(Protocol):
    """The stock implementation of a model, for parity checks and benchmarks."""

    def greedy(
        self,
        prepared: Prepared,
        steps: int,
        *,
        mode: ReferenceMode = "dynamic",
        max_length: int = 0,
        logits: bool = False,
    ) -> ReferenceRun:
        """Decode `steps` tokens greedily, past end tokens. `static` compiles over a static cache of `max_length`."""
        ...


ModelFactory = Callable[[Path, Any, torch.device, Progress], Model]
