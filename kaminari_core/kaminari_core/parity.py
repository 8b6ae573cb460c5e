"""Runs a model through one greedy reply without an engine, to be compared with its stock implementation step by step.

The engine hides logits and joins requests; a comparison wants neither. This makes the model's own calls in the engine's order:
embed, prefill in chunks, then one decode step per token over a cache that holds this reply alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from kaminari_core.cache import StaticCache
from kaminari_core.flow import Embedded, Prepared
from kaminari_core.layer_call import CompiledLayer, run_layer
from kaminari_core.protocols import LayerCall, Model, ReferenceRun, Step


def greedy(
    model: Model,
    prepared: Prepared,
    steps: int,
    *,
    chunk: int | None = None,
    compile: bool = False,
    alter: Callable[[Embedded], Embedded] = lambda embedded: embedded,
) -> ReferenceRun:
    """Decode `steps` tokens greedily, past end tokens, and keep the logits of every step, float32 (steps, vocabulary).

    `chunk` is how many prompt positions are prefilled at once, all of them when None. `compile` compiles the decoder layers'
    step. `alter` stands between embed and prefill, for tests that break something on purpose.
    """
    cache = StaticCache(model.shape, 1, prepared.length + steps, model.device, model.dtype)
    layer_call: LayerCall = CompiledLayer(limit=1) if compile else run_layer
    started = time.perf_counter()
    slot = cache.claim()
    embedded = alter(model.embed(prepared))
    kept: list[Tensor] = []
    logits = embedded.hidden
    for start in range(0, prepared.length, chunk or prepared.length):
        stop = min(prepared.length, start + (chunk or prepared.length))
        logits = model.prefill(embedded, start, stop, cache, slot)
    kept.append(logits.float())
    tokens = [int(logits.argmax())]
    prefilled = time.perf_counter()
    for step in range(steps - 1):
        fed = (tokens[-1], prepared.next_position + step, prepared.length + step)
        ids, positions, cursors = (torch.tensor([[value]], device=model.device) for value in fed)
        with torch.inference_mode():
            logits = model.decode(Step(ids, positions, cursors, cache.max_length), cache, layer_call)[0, 0]
        kept.append(logits.float())
        tokens.append(int(logits.argmax()))
    ended = time.perf_counter()
    return ReferenceRun(tuple(tokens), torch.stack(kept), prefilled - started, ended - prefilled)


def assert_same(ours: ReferenceRun, theirs: ReferenceRun, tolerance: float = 1e-4) -> None:
    """Raise AssertionError unless both chose the same tokens and all their logits agree within `tolerance`."""
    assert ours.logits is not None and theirs.logits is not None, "both runs must have kept their logits"
    first = next(
        (step for step, pair in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if pair[0] != pair[1]), None
    )
    assert first is None, f"tokens differ at step {first}: {ours.tokens[first]} and {theirs.tokens[first]}"
    difference = (ours.logits - theirs.logits).abs().amax(dim=-1)
    worst = int(difference.argmax())
    assert float(difference[worst]) <= tolerance, f"logits differ by {float(difference[worst]):.3g} at step {worst}"
