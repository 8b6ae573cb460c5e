"""The decode core: one compiled callable per (rows, length, width) bucket, run on static buffers.

A step is fed by one host-to-device copy of the rows' tokens, positions and cursors, and runs at the smallest batch bucket and
the smallest length bucket that cover the live rows, so every shape is one of a small fixed set and attention costs what is
used; where attention reads each row as far as it is filled, lengths need no buckets. The repeated decoder layer is the compiled
region: its graph is shared by all layers, so compile time does not grow with depth. On CUDA the whole step is captured once per
bucket and replayed; on a CPU, or with compile off, the same code runs directly.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kaminari_core.layer_call import CompiledLayer, run_layer
from kaminari_core.layers import attends_by_cursors
from kaminari_core.protocols import Cache, DraftingModel, Model, Progress, Step

logger = logging.getLogger(__name__)

SHORTEST_BUCKET = 256
"""Cache positions of the smallest length bucket: below this, attention is a small part of a step."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape of one step: batch rows, cache positions that are read, new tokens per row.

    `length` is 0 where each row is read as far as it is filled, so that one shape serves every length.
    """

    rows: int
    length: int
    width: int = 1


def doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 * first, 4 * first, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


class DecodeCore:
    """Runs decode steps of a model over a cache. Belongs to the engine thread.

    `widths` are the numbers of tokens per row that steps may have: 1, and k + 1 where k drafted tokens are verified.
    """

    def __init__(self, model: Model, cache: Cache, *, compile: bool, widths: Sequence[int] = (1,)) -> None:
        self.model, self.cache, self.widths = model, cache, tuple(widths)
        self.batch_buckets = doubling(1, cache.slots)
        self.length_buckets = (0,) if attends_by_cursors(model) else doubling(SHORTEST_BUCKET, cache.max_length)
        self._layer_call: Callable[..., Tensor] = run_layer
        self._compiled: CompiledLayer | None = None
        if compile:
            self._compiled = CompiledLayer(limit=len(self.buckets))
            self._layer_call = self._compiled
        self._inputs = {width: StepInputs(cache.slots, width, model.device) for width in self.widths}
        self._capture = compile and model.device.type == "cuda"
        self._graphs: dict[tuple[Bucket, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def compiles(self) -> int:
        """How many graphs the compiler has made: one per bucket that was used."""
        return 0 if self._compiled is None else self._compiled.compiles

    @property
    def buckets(self) -> list[Bucket]:
        """Every shape that a step can have."""
        return [Bucket(*sizes) for sizes in itertools.product(self.batch_buckets, self.length_buckets, self.widths)]

    def bucket(self, rows: int, longest: int, width: int = 1) -> Bucket:
        """The smallest bucket for `rows` live rows whose highest cursor is `longest`."""
        batch = next(size for size in self.batch_buckets if size >= rows)
        return Bucket(batch, next(size for size in self.length_buckets if size == 0 or size > longest), width)

    def step(
        self, tokens: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], cursors: Sequence[Sequence[int]]
    ) -> Tensor:
        """Feed each live row its next tokens, row i standing in slot i; returns the logits (rows, width, vocabulary).

        All arguments are (rows, width). The result lives in a static buffer on CUDA: use it before the next step.
        """
        bucket = self._feed(tokens, positions, cursors, [])
        return self._run(bucket, drafting=False)[: len(tokens)]

    def draft_step(
        self,
        tokens: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        cursors: Sequence[Sequence[int]],
        ends: Sequence[int],
    ) -> Tensor:
        """As `step`, through the model's draft head; returns the logits (rows, vocabulary) at each row's index `ends`."""
        bucket = self._feed(tokens, positions, cursors, ends)
        return self._run(bucket, drafting=True)[: len(tokens)]

    def warm_up(self, progress: Progress) -> None:
        """Compile and capture every bucket. Must run before any slot is claimed: it writes to spare positions only."""
        for inputs in self._inputs.values():
            inputs.clear(self.cache.max_length)
        modes = (False, True) if self.model.shape.draft_layers else (False,)
        shapes = list(itertools.product(self.buckets, modes))
        for done, (bucket, drafting) in enumerate(shapes):
            progress("compile", done, len(shapes))
            self._run(bucket, drafting=drafting)
        progress("compile", len(shapes), len(shapes))

    def probe(self) -> None:
        """Run a real step of the smallest bucket and wait for it. As `warm_up` it needs no request, and no row may be live."""
        self._inputs[self.widths[0]].clear(self.cache.max_length)
        self._run(self.buckets[0], drafting=False).argmax().item()

    def _feed(
        self,
        tokens: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        cursors: Sequence[Sequence[int]],
        ends: Sequence[int],
    ) -> Bucket:
        spare = self.cache.max_length
        longest = max(cursor for row in cursors for cursor in row if cursor < spare)
        bucket = self.bucket(len(tokens), longest, len(tokens[0]))
        self._inputs[bucket.width].feed(tokens, positions, cursors, ends, rows=bucket.rows, spare=spare)
        return bucket

    def _run(self, bucket: Bucket, *, drafting: bool) -> Tensor:
        if not self._capture:
            return self._compute(bucket, drafting)
        key = bucket, drafting
        if key not in self._graphs:
            self._graphs[key] = self._record(bucket, drafting)
        graph, logits = self._graphs[key]
        graph.replay()
        return logits

    def _compute(self, bucket: Bucket, drafting: bool) -> Tensor:
        step, ends = self._inputs[bucket.width].view(bucket)
        with torch.inference_mode():
            if not drafting:
                return self.model.decode(step, self.cache, self._layer_call)
            model = cast(DraftingModel, self.model)
            return model.draft(step, ends, self.cache, self._layer_call)

    def _record(self, bucket: Bucket, drafting: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture one bucket. The first run, outside the graph, compiles and lets libraries allocate their workspaces.

        Running a step twice on the same inputs writes the same keys and values twice, so capture needs no copy of the cache; but
        a draft step goes on from the hidden states that it leaves, so those are put back.
        """
        state = self.cache.state.clone() if drafting and self.cache.state is not None else None
        side = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(side):
            self._compute(bucket, drafting)
            if state is not None and self.cache.state is not None:
                self.cache.state.copy_(state)
        torch.cuda.current_stream(self.model.device).wait_stream(side)
        pool = next((graph.pool() for graph, _ in self._graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._compute(bucket, drafting)
        logger.debug("captured %s", bucket)
        return graph, logits


class StepInputs:
    """The static input buffers of steps of one width, filled by a single copy to the device."""

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        # Three planes of tokens, positions, cursors, and one whose first column is `ends`.
        shape = (4, slots, width)
        self._staging = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=device)

    def feed(
        self,
        tokens: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        cursors: Sequence[Sequence[int]],
        ends: Sequence[int],
        *,
        rows: int,
        spare: int,
    ) -> None:
        """Fill the first `rows` rows; those without a request get the spare cursor."""
        width = self._staging.shape[2]
        idle = rows - len(tokens)
        nothing = [[0] * width] * idle
        planes = [[*tokens, *nothing], [*positions, *nothing], [*cursors, *[[spare] * width] * idle]]
        self._staging[:3, :rows] = torch.tensor(planes)
        if ends:
            self._staging[3, : len(ends), 0] = torch.tensor(ends)
        self._inputs.copy_(self._staging, non_blocking=True)

    def clear(self, spare: int) -> None:
        """No request in any row."""
        self._staging.zero_()
        self._staging[2] = spare
        self._inputs.copy_(self._staging)

    def view(self, bucket: Bucket) -> tuple[Step, Tensor]:
        """The step of a bucket and the `ends` (rows) of a drafting one."""
        tokens, positions, cursors, ends = self._inputs[:, : bucket.rows]
        return Step(tokens, positions, cursors, bucket.length), ends[:, 0]
