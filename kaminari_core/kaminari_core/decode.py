"""The decode core: one compiled callable per (rows, length) bucket, run on static buffers.

A step is fed by one host-to-device copy of the rows' tokens, positions and cursors, and runs at the smallest batch bucket and
the smallest length bucket that cover the live rows, so every shape is one of a small fixed set and attention costs what is
used. The repeated decoder layer is the compiled region: its graph is shared by all layers, so compile time does not grow with
depth. On CUDA the whole step is captured once per bucket and replayed; on a CPU, or with compile off, the same code runs
directly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kaminari_core.protocols import Cache, Model, Progress, Step

logger = logging.getLogger(__name__)

SHORTEST_BUCKET = 256
"""Cache positions of the smallest length bucket: below this, attention is a small part of a step."""

Bucket = tuple[int, int]
"""(rows, length)"""


def doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 * first, 4 * first, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def run_layer(layer: nn.Module, *arguments: Tensor) -> Tensor:
    """Call the layer's decode method eagerly."""
    out: Tensor = layer.decode(*arguments)  # type: ignore[operator]
    return out


class CompiledLayer:
    """`run_layer`, compiled once per bucket with no graph break allowed; `compiles` counts what the compiler really did."""

    def __init__(self, limit: int) -> None:
        self.compiles = 0
        inductor = torch._dynamo.lookup_backend("inductor")

        def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            self.compiles += 1
            compiled: Callable[..., Any] = inductor(graph, inputs)
            return compiled

        # Isolated: another engine in this process compiles the same code object under its own limit.
        compile: Callable[..., Callable[..., Tensor]] = torch.compile
        self._call = compile(
            run_layer, fullgraph=True, dynamic=False, backend=counted, recompile_limit=limit, isolate_recompiles=True
        )

    def __call__(self, layer: nn.Module, *arguments: Tensor) -> Tensor:
        return self._call(layer, *arguments)


class DecodeCore:
    """Runs decode steps of a model over a cache. Belongs to the engine thread."""

    def __init__(self, model: Model, cache: Cache, *, compile: bool, width: int = 1) -> None:
        self.model, self.cache = model, cache
        self.batch_buckets = doubling(1, cache.slots)
        self.length_buckets = doubling(SHORTEST_BUCKET, cache.max_length)
        self._layer_call: Callable[..., Tensor] = run_layer
        self._compiled: CompiledLayer | None = None
        if compile:
            self._compiled = CompiledLayer(limit=len(self.batch_buckets) * len(self.length_buckets))
            self._layer_call = self._compiled
        self._capture = compile and model.device.type == "cuda"
        self._graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        shape = (3, cache.slots, width)
        self._staging = torch.zeros(shape, dtype=torch.int64, pin_memory=model.device.type == "cuda")
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=model.device)

    @property
    def compiles(self) -> int:
        """How many graphs the compiler has made: one per bucket that was used."""
        return 0 if self._compiled is None else self._compiled.compiles

    @property
    def buckets(self) -> list[Bucket]:
        """Every (rows, length) that a step can run at."""
        return [(rows, length) for rows in self.batch_buckets for length in self.length_buckets]

    def bucket(self, rows: int, longest: int) -> Bucket:
        """The smallest bucket for `rows` live rows whose highest cursor is `longest`."""
        batch = next(size for size in self.batch_buckets if size >= rows)
        return batch, next(size for size in self.length_buckets if size > longest)

    def step(self, tokens: Sequence[int], positions: Sequence[int], cursors: Sequence[int]) -> Tensor:
        """Decode one token for each live row, row i standing in slot i. Returns the logits (rows, 1, vocabulary).

        The result lives in a static buffer on CUDA: use it before the next step.
        """
        rows, length = self.bucket(len(tokens), max(cursors))
        idle = [0] * (rows - len(tokens))
        spare = [self.cache.max_length] * len(idle)
        feed = [[*tokens, *idle], [*positions, *idle], [*cursors, *spare]]
        self._staging[:, :rows, 0] = torch.tensor(feed)
        self._inputs.copy_(self._staging, non_blocking=True)
        return self._run((rows, length))[: len(tokens)]

    def warm_up(self, progress: Progress) -> None:
        """Compile and capture every bucket. Must run before any slot is claimed: it writes to spare positions only."""
        buckets = self.buckets
        self._staging[:2] = 0
        self._staging[2] = self.cache.max_length
        self._inputs.copy_(self._staging)
        for done, bucket in enumerate(buckets):
            progress("compile", done, len(buckets))
            self._run(bucket)
        progress("compile", len(buckets), len(buckets))

    def _run(self, bucket: Bucket) -> Tensor:
        if not self._capture:
            return self._decode(bucket)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._record(bucket)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits

    def _decode(self, bucket: Bucket) -> Tensor:
        rows, length = bucket
        tokens, positions, cursors = self._inputs[:, :rows]
        with torch.inference_mode():
            return self.model.decode(Step(tokens, positions, cursors, length), self.cache, self._layer_call)

    def _record(self, bucket: Bucket) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture one bucket. The first run, outside the graph, compiles and lets libraries allocate their workspaces.

        Running a step twice on the same inputs writes the same keys and values twice, so capture needs no copy of the cache.
        """
        side = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(side):
            self._decode(bucket)
        torch.cuda.current_stream(self.model.device).wait_stream(side)
        pool = next((graph.pool() for graph, _ in self._graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._decode(bucket)
        logger.debug("captured the decode step for %d rows and %d positions", *bucket)
        return graph, logits
