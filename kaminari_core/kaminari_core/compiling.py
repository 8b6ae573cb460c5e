"""Compiles everything that an engine of given settings will ever run, ahead of time, and says what a start costs then.

The work is the engine's own warm-up; the result lies in the directory of `cache_directory`. A second process repeats the start,
to show what is left of it: tracing, and loading what was compiled.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaminari_core.cache_directory import keep_graphs
from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.protocols import Progress
from kaminari_core.registry import Registry, load_registry, selected_plugins
from kaminari_core.specs import ModelSpec

if TYPE_CHECKING:
    from kaminari_core.vision_parts import Part

ROUNDS = 5
"""Turns of each part of a vision tower, eagerly and compiled."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of an engine: seconds to load the weights and to make its graphs; of these, how many the compiler made and
    how many it found; and the directory where they are kept.
    """

    load_seconds: float
    graph_seconds: float
    compiled: int
    found: int
    directory: Path


def start(registry: Registry, model: str, checkpoint: str | None, config: EngineConfig, progress: Progress) -> Start:
    """Load a model and make every graph of its engine, in this process. Raises KaminariError."""
    from torch._dynamo.utils import counters

    from kaminari_core.checkpoint import resolve
    from kaminari_core.launch import engine_over, load_model
    from kaminari_core.vision_parts import warm_up

    directory = keep_graphs()
    spec, folder = resolve(registry, model, checkpoint)
    began = time.perf_counter()
    loaded, config = load_model(registry, spec, folder, config, progress)
    engine = engine_over(registry, spec, loaded, config)
    opened = time.perf_counter()
    before = dict(counters["inductor"])
    warm_up(loaded, progress)
    engine.warm_up(progress)
    ended = time.perf_counter()
    counted = counters["inductor"]
    compiled, found = (counted[name] - before.get(name, 0) for name in ("fxgraph_cache_miss", "fxgraph_cache_hit"))
    return Start(opened - began, ended - opened, compiled, found, directory)


def start_again(model: str, checkpoint: str, config: EngineConfig) -> Start:
    """As `start`, in a fresh process with the installed plugins and as many threads as this one computes with."""
    import torch

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_start, model, checkpoint, config, torch.get_num_threads()).result()


def _start(model: str, checkpoint: str, config: EngineConfig, threads: int) -> Start:
    import torch

    from kaminari_core.progress import silent

    torch.set_num_threads(threads)
    return start(load_registry(only=selected_plugins()), model, checkpoint, config, silent)


def measure_vision(
    registry: Registry, spec: ModelSpec, folder: Path, config: EngineConfig, progress: Progress
) -> list[Part]:
    """Measure the parts of a model's vision tower on its largest picture, and remember which win.

    Raises UsageError for a model without a tower of the core's kind.
    """
    from kaminari_core.launch import load_model
    from kaminari_core.vision_parts import keep, measure, record_file, tower_of

    loaded, _ = load_model(registry, spec, folder, replace(config, compile_vision="off"), progress)
    tower = tower_of(loaded)
    if tower is None:
        raise UsageError(f"{spec.name} has no vision tower whose parts can be compiled; leave --report out")
    parts = measure(tower, config.visual_tokens, ROUNDS, progress)
    keep(record_file(loaded, spec.name), parts)
    return parts


def report(first: Start, second: Start, parts: Sequence[Part]) -> dict[str, Any]:
    """Both starts and the parts as plain values."""
    return {
        "directory": str(first.directory),
        "parts": [
            {
                "name": part.name,
                "modules": part.modules,
                "eager_ms": 1000 * part.eager,
                "compiled_ms": 1000 * part.compiled,
                "cold": part.cold,
                "warm": part.warm,
                "wins": part.wins,
                "pays_cold": math.ceil(part.break_even(part.cold)) if part.wins else None,
                "pays_warm": math.ceil(part.break_even(part.warm)) if part.wins else None,
            }
            for part in parts
        ],
        "starts": [
            {
                "start": name,
                "compiled": each.compiled,
                "found": each.found,
                "load_seconds": round(each.load_seconds, 2),
                "graph_seconds": round(each.graph_seconds, 2),
            }
            for name, each in (("this one", first), ("the next, in a new process", second))
        ],
    }
