"""Counters of one engine, read by front ends. Plain numbers: nothing here knows a metrics system."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kaminari_core.circuit import State as CircuitState


@dataclass(frozen=True, slots=True)
class Stats:
    """A consistent-enough snapshot for people and gauges.

    `preparing`, `waiting` and `running` are requests; `finished` maps finish reasons (and `failed`) to requests; `compiles`
    is how many graphs the decode step has compiled; `rows` is the sum of live rows over all `steps`, so rows / steps is the
    mean batch; `batches` counts the scheduler's answers that started requests; `drafts_paused` are the numbers of rows at which
    guessing loses and is off; `circuit` is that of the decode step and `restarts` counts those of a supervised engine's process;
    `mask_copies` counts the steps in which a row was held to a structure.
    """

    preparing: int
    waiting: int
    running: int
    slots: int
    slots_busy: int
    steps: int
    rows: int
    prompt_tokens: int
    generated_tokens: int
    compiles: int
    finished: Mapping[str, int]
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    drafts_paused: tuple[int, ...] = ()
    batches: int = 0
    circuit: CircuitState = "closed"
    restarts: int = 0
    mask_copies: int = 0


def peak_memory(device: torch.device) -> int:
    """Peak bytes of the device allocator on CUDA, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes (getrusage(2) of each).
    return peak if sys.platform == "darwin" else peak * 1024
