"""The same pages, the same visual-token budget, one row of figures per model: quality, speed, memory.

Each model runs in a process of its own, one after the other: peak memory on a CPU is a figure of the process, and nothing that
one model leaves behind slows the next.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaminari_core.config import EngineConfig
from kaminari_core.errors import RequestError, UsageError
from kaminari_core.quality import Score, score, total

if TYPE_CHECKING:
    from kaminari_core.engine import Engine

TRUTHS = "truths.json"
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp")


@dataclass(frozen=True, slots=True)
class Page:
    """A picture and what stands on it."""

    name: str
    file: Path
    truth: str


@dataclass(frozen=True, slots=True)
class Read:
    """What one model made of one page. `error` is why it was refused, and then `text` is empty: it counts as read wrong."""

    page: str
    text: str
    score: Score
    visual_tokens: int
    tokens: int
    finish: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Figures:
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
    def score(self) -> Score:
        """Over all pages."""
        return total(read.score for read in self.pages)


def read_set(folder: Path) -> list[Page]:
    """The pages of a directory: the pictures that its truths.json names, or those with a .txt of the same name beside them.

    truths.json maps file names to texts. Raises UsageError for a directory without pages, and for a truth without picture.
    """
    if not folder.is_dir():
        raise UsageError(f"the set {folder} is no directory")
    truths = folder / TRUTHS
    if truths.is_file():
        pages = [Page(name, folder / name, text) for name, text in _truths(truths).items()]
    else:
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURES)
        pages = [
            Page(file.name, file, file.with_suffix(".txt").read_text(encoding="utf-8"))
            for file in files
            if file.with_suffix(".txt").is_file()
        ]
    if not pages:
        raise UsageError(f"the set {folder} has no pages: neither {TRUTHS} nor pictures with a .txt of the same name")
    for page in pages:
        if not page.file.is_file():
            raise UsageError(f"{truths} names {page.name!r}, which is not there")
    return pages


def run_alone(model: str, checkpoint: str, pages: Sequence[Page], task: str, config: EngineConfig) -> Figures:
    """`measure` in a fresh process, with the plugins that are installed. Raises what it raises."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, model, checkpoint, pages, task, config).result()


def measure(model: str, checkpoint: str, pages: Sequence[Page], task: str, config: EngineConfig) -> Figures:
    """Let one model read all pages, in this process. Raises KaminariError for what concerns all of them."""
    from kaminari_core.launch import open_engine
    from kaminari_core.progress import silent
    from kaminari_core.registry import load_registry, selected_plugins

    config = replace(config, queue=max(config.queue, len(pages)))
    engine = open_engine(load_registry(only=selected_plugins()), model, checkpoint, config, silent)
    try:
        return _measure(engine, checkpoint, pages, task)
    finally:
        engine.close()


def _measure(engine: Engine, checkpoint: str, pages: Sequence[Page], task: str) -> Figures:
    from kaminari_core.bench import machine_facts
    from kaminari_core.flow import Failed, Finished, ImagePart, Message, Request, TextPart
    from kaminari_core.stats import peak_memory

    words = engine.tasks[task]
    requests = [
        Request((Message("user", (ImagePart(page.file.read_bytes(), page.name), TextPart(words))),)) for page in pages
    ]
    _served(engine, [Request(requests[0].messages)])
    started = time.perf_counter()
    ends = _served(engine, requests)
    seconds = time.perf_counter() - started
    reads, results = [], []
    for page, end in zip(pages, ends, strict=True):
        if isinstance(end, Finished):
            result = end.result
            results.append(result)
            visual = sum(saw.visual_tokens for saw in result.saw)
            found = score(result.text, page.truth)
            count = result.usage.completion_tokens
            reads.append(Read(page.name, result.text, found, visual, count, result.finish_detail))
        else:
            assert isinstance(end, Failed), "a request ends with one of the two"
            if not isinstance(end.error, RequestError):
                raise end.error
            reads.append(Read(page.name, "", score("", page.truth), 0, 0, "failed", str(end.error)))
    if not results:
        raise UsageError(f"{engine.name} could read no page of the set; the first: {reads[0].error}")
    return Figures(
        model=engine.name,
        checkpoint=checkpoint,
        task=task,
        pages=tuple(reads),
        seconds=seconds,
        tokens_per_s=sum(read.tokens for read in reads) / seconds,
        row_tokens_per_s=statistics.median(result.timings.tokens_per_s for result in results),
        prefill=statistics.median(result.timings.prefill for result in results),
        memory=peak_memory(engine.model.device),
        machine=machine_facts(engine.model.device),
        config=asdict(engine.config),
    )


def _served(engine: Engine, requests: Sequence[Any]) -> list[Any]:
    """The last event of each request, submitted together."""
    import queue

    from kaminari_core.flow import Event, Failed, Finished

    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for request in requests:
        engine.submit(request, events.put)
    ends: dict[str, Event] = {}
    while len(ends) < len(requests):
        event = events.get()
        if isinstance(event, Finished | Failed):
            ends[event.request_id] = event
    return [ends[request.id] for request in requests]


def table(found: Sequence[Figures]) -> str:
    """The figures as a Markdown table."""
    head = (
        "model", "checkpoint", "pages", "CER", "WER", "exact lines", "visual tokens/page", "tokens/s", "tokens/s of a reply",
        "prefill ms", "s/page", "peak memory MB",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for figures in found:
        quality, count = figures.score, len(figures.pages)
        cells = (
            figures.model, figures.checkpoint, str(count), f"{quality.cer:.2%}", f"{quality.wer:.2%}",
            f"{quality.exact_lines} of {quality.lines} ({quality.exact:.0%})",
            f"{statistics.mean(read.visual_tokens for read in figures.pages):.0f}", f"{figures.tokens_per_s:.1f}",
            f"{figures.row_tokens_per_s:.1f}", f"{figures.prefill * 1000:.0f}", f"{figures.seconds / count:.2f}",
            f"{figures.memory / 1e6:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(found: Sequence[Figures], folder: Path, config: EngineConfig) -> dict[str, Any]:
    """Everything needed to read the figures later, with what each model read on each page."""
    from kaminari_core.bench import versions

    return {
        "command": " ".join(["kaminari", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "set": {"name": folder.name, "pages": len(found[0].pages), "lines": found[0].score.lines},
        "visual_tokens": config.visual_tokens,
        "models": [
            {**asdict(figures), "cer": figures.score.cer, "wer": figures.score.wer, "exact_lines": figures.score.exact}
            for figures in found
        ],
    }


def _truths(path: Path) -> dict[str, str]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(text, str) for text in values.values()):
        raise UsageError(f"{path} must be a JSON object of file names and texts")
    return values
