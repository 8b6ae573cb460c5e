"""One model on one set: everything that was read, scored and timed.

A comparison runs each configuration in a process of its own, one after the other: peak memory on a CPU is a figure of the
process, and nothing that one leaves behind slows the next. These processes are forked from one that has imported torch and the
first model's code and done nothing, so that starting them costs little.
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
    from kaminari_core.specs import ModelSpec

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


def run_alone(
    spec: ModelSpec, checkpoint: str, samples: Sequence[Sample], task: str, config: EngineConfig
) -> Evaluation:
    """`run` in a fresh process, with the plugins that are installed. Raises what it raises."""
    context = multiprocessing.get_context("forkserver")
    # Only what is named before the first of these processes counts.
    context.set_forkserver_preload([*PRELOADED, spec.target.partition(":")[0]])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run, spec.name, checkpoint, samples, task, config).result()


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

    read_samples(engine, samples[:1], task, silent)
    started = time.perf_counter()
    outcomes = read_samples(engine, samples, task, progress)
    seconds = time.perf_counter() - started
    if all(outcome.status == "failed" for outcome in outcomes):
        raise UsageError(f"{engine.name} could read no page of the set; the first: {outcomes[0].page.error}")
    results = [result for outcome in outcomes for result in outcome.page.results]
    return Evaluation(
        model=engine.name,
        checkpoint=checkpoint,
        task=task,
        pages=tuple(_read(outcome) for outcome in outcomes),
        seconds=seconds,
        tokens_per_s=sum(result.usage.completion_tokens for result in results) / seconds,
        row_tokens_per_s=_median([result.timings.tokens_per_s for result in results]),
        prefill=_median([result.timings.prefill for result in results]),
        memory=peak_memory(engine.model.device),
        machine=machine_facts(engine.model.device),
        config=asdict(engine.config),
    )


def _median(values: Sequence[float]) -> float:
    """The median, 0 of nothing, as when all pages are blank."""
    return statistics.median(values) if values else 0.0


def _read(outcome: Outcome) -> Read:
    sample, page = outcome.sample, outcome.page
    return Read(
        page=sample.name,
        group=sample.group,
        status=outcome.status,
        truth=sample.text if sample.text is not None else " | ".join(sample.answers) or None,
        text=page.text,
        score=score_page(sample, page.text),
        visual_tokens=sum(piece.saw.visual_tokens for piece in page.pieces if piece.saw),
        tokens=page.usage.completion_tokens,
        finish=page.finish_detail or page.status,
        error=None if page.error is None else str(page.error),
    )
