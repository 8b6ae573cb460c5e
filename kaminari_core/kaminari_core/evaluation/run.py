"""One model on one set: everything that was read, scored and timed.

A comparison runs each configuration in a process of its own, one after the other: peak memory on a CPU is a figure of the
process, and nothing that one leaves behind slows the next. These processes are forked from one that has imported torch and
nothing more, so that starting them costs little.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.evaluation.sample import Sample
from kaminari_core.evaluation.scoring import PageScore, Quality, score_page, summarize

if TYPE_CHECKING:
    from kaminari_core.engine import Engine
    from kaminari_core.evaluation.reading import Outcome
    from kaminari_core.protocols import Progress

PRELOADED = ("kaminari_core.engine", "kaminari_core.evaluation.reading", "kaminari_core.launch")


@dataclass(frozen=True, slots=True)
class Read:
    """What one model made of one page. `error` is why it failed, and then `text` is empty: it counts as read wrong."""

    page: str
    group: str
    status: str
    truth: str | None
    text: str
    score: PageScore
    visual_tokens: int
    tokens: int
    finish: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One model on a set. Seconds are of the whole set with the engine's slots full; the first page, read once before, warms up.

    `tokens_per_s` counts generated tokens over those seconds, `row_tokens_per_s` is the median of single replies while they
    decoded, `prefill` the median of seconds from a page's turn to its first token, `memory` the peak in bytes of the device
    allocator (CUDA) or of the process (CPU).
    """

    model: str
    checkpoint: str
    task: str
    pages: tuple[Read, ...]
    seconds: float
    tokens_per_s: float
    row_tokens_per_s: float
    prefill: float
    memory: int
    machine: dict[str, Any]
    config: dict[str, Any]

    @property
    def quality(self) -> Quality:
        """Over all pages."""
        return self.quality_of(self.pages)

    @property
    def pages_per_s(self) -> float:
        """Pages over seconds, failed ones included."""
        return len(self.pages) / self.seconds

    @property
    def visual_tokens(self) -> float:
        """Mean visual tokens of a page."""
        return statistics.mean(read.visual_tokens for read in self.pages)

    def quality_of(self, pages: Sequence[Read]) -> Quality:
        """Over some pages."""
        return summarize([(read.status, read.score) for read in pages])

    def groups(self) -> dict[str, Quality]:
        """By group, in order of appearance; empty when all pages are of one."""
        names = dict.fromkeys(read.group for read in self.pages)
        if len(names) < 2:
            return {}
        return {name: self.quality_of([read for read in self.pages if read.group == name]) for name in names}


def run_alone(model: str, checkpoint: str, samples: Sequence[Sample], task: str, config: EngineConfig) -> Evaluation:
    """`run` in a fresh process, with the plugins that are installed. Raises what it raises."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run, model, checkpoint, samples, task, config).result()


def run(model: str, checkpoint: str, samples: Sequence[Sample], task: str, config: EngineConfig) -> Evaluation:
    """Let one model read all samples, in this process, with the plugins that are installed. Raises KaminariError."""
    from kaminari_core.launch import open_engine
    from kaminari_core.progress import silent
    from kaminari_core.registry import load_registry, selected_plugins

    engine = open_engine(load_registry(only=selected_plugins()), model, checkpoint, config, silent)
    try:
        return evaluate(engine, checkpoint, samples, task, silent)
    finally:
        engine.close()


def evaluate(engine: Engine, checkpoint: str, samples: Sequence[Sample], task: str, progress: Progress) -> Evaluation:
    """Let an engine read all samples. Raises UsageError when it can read none of them."""
    from kaminari_core.bench import machine_facts
    from kaminari_core.evaluation.reading import read_samples
    from kaminari_core.progress import silent
    from kaminari_core.stats import peak_memory

    phrase = engine.tasks[task]
    read_samples(engine, samples[:1], phrase, silent)
    started = time.perf_counter()
    outcomes = read_samples(engine, samples, phrase, progress)
    seconds = time.perf_counter() - started
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    if not results:
        raise UsageError(f"{engine.name} could read no page of the set; the first: {outcomes[0].error}")
    return Evaluation(
        model=engine.name,
        checkpoint=checkpoint,
        task=task,
        pages=tuple(_read(outcome) for outcome in outcomes),
        seconds=seconds,
        tokens_per_s=sum(result.usage.completion_tokens for result in results) / seconds,
        row_tokens_per_s=statistics.median(result.timings.tokens_per_s for result in results),
        prefill=statistics.median(result.timings.prefill for result in results),
        memory=peak_memory(engine.model.device),
        machine=machine_facts(engine.model.device),
        config=asdict(engine.config),
    )


def _read(outcome: Outcome) -> Read:
    sample, result = outcome.sample, outcome.result
    return Read(
        page=sample.name,
        group=sample.group,
        status=outcome.status,
        truth=sample.text if sample.text is not None else " | ".join(sample.answers) or None,
        text=outcome.text,
        score=score_page(sample, outcome.text),
        visual_tokens=sum(saw.visual_tokens for saw in result.saw) if result else 0,
        tokens=result.usage.completion_tokens if result else 0,
        finish=result.finish_detail if result else "failed",
        error=None if outcome.error is None else str(outcome.error),
    )
