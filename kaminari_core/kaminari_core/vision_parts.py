"""Which parts of a vision tower are worth compiling on this machine: measured by `kaminari compile --report`, kept in a file, and
used when an engine opens.

Compiling pays where a part's graph is quicker than its operators by enough to earn the compile time back; where that is the case
depends on the processor, the threads and the sizes, so it is measured and not believed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kaminari_core.cache_directory import cache_directory, graph_directory
from kaminari_core.config import EngineConfig
from kaminari_core.protocols import Model, Progress
from kaminari_core.vision import StockTower, VisionBlock, compiled_calls, run_block, run_module

logger = logging.getLogger(__name__)

WINS = 0.97
"""A part wins when its compiled time is at most this share of the eager one: less is within the noise."""
SMALLEST = 4
"""Visual tokens of the picture that warms up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One part of a tower for one picture: seconds eagerly and compiled, and what the graph costs cold and warm.

    Cold, it is compiled; warm, a new process finds it in the cache and only traces and loads it.
    """

    name: str
    modules: int
    eager: float
    compiled: float
    cold: float
    warm: float

    @property
    def wins(self) -> bool:
        """Whether compiling it gains anything."""
        return self.compiled <= WINS * self.eager

    def break_even(self, cost: float) -> float:
        """Pictures after which a graph that costs so many seconds has paid; infinite where it never does."""
        return cost / (self.eager - self.compiled) if self.wins else math.inf


def tower_of(model: Model) -> StockTower | None:
    """The vision tower of a loaded model that has one of the core's kind."""
    networks = [value for value in vars(model).values() if isinstance(value, nn.Module)]
    towers = [module for network in networks for module in network.modules() if isinstance(module, StockTower)]
    return towers[0] if towers else None


@torch.inference_mode()
def measure(tower: StockTower, tokens: int, rounds: int, progress: Progress) -> list[Part]:
    """Measure every part on one picture of `tokens` visual tokens, eagerly and compiled in turns; medians."""
    inputs = _inputs(tower, tokens)
    found = []
    parts = tower.parts()
    for done, (name, modules) in enumerate(parts.items()):
        progress("measure", done, len(parts))
        found.append(_measure_part(name, modules, inputs, rounds))
    progress("measure", len(parts), len(parts))
    return found


def _measure_part(
    name: str, modules: Sequence[nn.Module], inputs: Mapping[nn.Module, tuple[Tensor, ...]], rounds: int
) -> Part:
    from torch._inductor.utils import fresh_cache

    def run(calls: Mapping[nn.Module, Callable[..., Tensor]], some: Sequence[nn.Module] = modules) -> float:
        started = time.perf_counter()
        for module in some:
            out = calls[module](module, *inputs[module])
        if out.device.type == "cuda":
            torch.cuda.synchronize(out.device)
        return time.perf_counter() - started

    eager = dict.fromkeys(modules, run_block if isinstance(modules[0], VisionBlock) else run_module)
    run(eager)
    with fresh_cache():
        # The first module makes the graph; what it takes to run is taken off.
        once = run(eager, modules[:1])
        cold = run(compiled_calls(list(modules)), modules[:1]) - once
        torch._dynamo.reset()
        compiled = compiled_calls(list(modules))
        warm = run(compiled, modules[:1]) - once
        times = [(run(eager), run(compiled)) for _ in range(rounds)]
    medians = [statistics.median(each) for each in zip(*times, strict=True)]
    return Part(name, len(modules), medians[0], medians[1], cold, warm)


def _inputs(tower: StockTower, tokens: int) -> dict[nn.Module, tuple[Tensor, ...]]:
    """What each module of each part is called with for one picture."""
    seen: dict[nn.Module, tuple[Tensor, ...]] = {}

    def note(module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        tables = named.get("position_embeddings", ())
        seen[module] = (*arguments, *tables)

    modules = [module for part in tower.parts().values() for module in part]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    tower(tower.picture(tokens))
    for hook in hooks:
        hook.remove()
    return seen


def record_file(model: Model, name: str) -> Path:
    """Where the answer for a model is kept: by versions, processor, sizes, dtype, device and threads."""
    tower = tower_of(model)
    assert tower is not None, "a model without vision tower has no parts"
    hidden, depth = tower.tower.patch_embed.weight.shape[0], len(tower.tower.blocks)
    dtype = str(model.dtype).removeprefix("torch.")
    place = f"{model.device.type}-{torch.get_num_threads()}"
    return graph_directory(cache_directory()).with_name("vision") / f"{name}-{hidden}x{depth}-{dtype}-{place}.json"


def keep(file: Path, parts: Sequence[Part]) -> None:
    """Write which parts win. Raises OSError where the file cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    found = {"torch": torch.__version__, "wins": [part.name for part in parts if part.wins]}
    file.write_text(json.dumps(found) + "\n", encoding="utf-8")


def compile_winners(model: Model, name: str, config: EngineConfig) -> list[str]:
    """Compile, on first use, the parts that the configuration asks for; returns their names.

    `on` is the blocks; `auto` what was measured to win here, and nothing where nobody has measured.
    """
    tower = tower_of(model)
    if tower is None or not config.compile or config.compile_vision == "off":
        return []
    wanted = ["blocks"] if config.compile_vision == "on" else _winners(record_file(model, name))
    for part in wanted:
        tower.compile_part(part)
    if wanted:
        logger.info("of the vision tower, compiled: %s", ", ".join(wanted))
    return wanted


def warm_up(model: Model, progress: Progress) -> None:
    """Make the graphs of the compiled parts, with a small picture: a graph serves every size."""
    tower = tower_of(model)
    if tower is None:
        return
    progress("compile vision", 0, 1)
    with torch.inference_mode():
        tower(tower.picture(SMALLEST))
    progress("compile vision", 1, 1)


def _winners(file: Path) -> list[str]:
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    # What was measured with another version says nothing about this one.
    return list(found["wins"]) if found["torch"] == torch.__version__ else []
