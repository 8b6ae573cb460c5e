"""Compiles everything that an engine of given settings will ever run, ahead of time, and says what a start costs then.

The work is the engine's own warm-up; the result lies in the directory of `cache_directory`. A second process repeats the start,
to show what is left of it: tracing, and loading what was compiled.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaminari_core.cache_directory import keep_graphs
from kaminari_core.config import EngineConfig
from kaminari_core.protocols import Progress
from kaminari_core.registry import Registry, load_registry, selected_plugins


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

    directory = keep_graphs()
    spec, folder = resolve(registry, model, checkpoint)
    began = time.perf_counter()
    loaded, config = load_model(registry, spec, folder, config, progress)
    engine = engine_over(registry, spec, loaded, config)
    opened = time.perf_counter()
    before = dict(counters["inductor"])
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


def report(first: Start, second: Start) -> dict[str, Any]:
    """Both starts as plain values."""
    return {
        "directory": str(first.directory),
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
