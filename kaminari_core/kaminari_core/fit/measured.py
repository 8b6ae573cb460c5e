"""What a run really allocates, to hold a plan to: the peak of torch's own allocations, on a CPU to the byte.

On a card the allocator keeps the figure. On a CPU it does not, but it reports every allocation to the profiler, whose events are
added up here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kaminari_core.flow import Prepared
    from kaminari_core.protocols import Cache, Model


def allocation_peak(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that tensors made while `run` runs in this thread take at once, beside those that are there before."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler
    assert results is not None and results.kineto_results is not None, "the profiler has run"
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def serve_once(model: Model, cache: Cache, prepared: Prepared, *, chunk: int, steps: int = 2) -> None:
    """What the engine does for one request, in this thread: embed, prefill in chunks, and eager steps of every slot."""
    import torch

    from kaminari_core.decode import DecodeCore

    with torch.inference_mode():
        embedded = model.embed(prepared)
        for start in range(0, prepared.length, chunk):
            logits = model.prefill(embedded, start, min(start + chunk, prepared.length), cache, 0)
        core = DecodeCore(model, cache, compile=False)
        tokens = [[int(logits.argmax())]] * cache.slots
        for step in range(steps):
            at = [[min(prepared.length + step, cache.max_length - 1)]] * cache.slots
            core.step(tokens, at, at)
