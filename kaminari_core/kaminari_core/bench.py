"""Measurements of an engine and of the stock implementation of the same model, in one run.

The machine may be busy and its clock may wander, so the contenders take turns, round after round, and the median of each is
compared with the median of the others: a ratio within one run means something, two absolute figures of two runs do not.
Every contender decodes the same prompt greedily, past end tokens, for the same number of steps.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kaminari_core.engine import Engine
from kaminari_core.errors import RequestError
from kaminari_core.flow import Event, Failed, Finished, ImagePart, Message, Request, Result, TextPart
from kaminari_core.protocols import Progress, Reference, ReferenceMode
from kaminari_core.threads import release_helpers

logger = logging.getLogger(__name__)

FILLER = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender in one round: tokens per second over all its rows while decoding, and seconds to the first token.

    `acceptance` is the share of drafted tokens that were accepted, None where none were drafted.
    """

    contender: str
    rows: int
    tokens_per_s: float
    ttft: float
    acceptance: float | None = None


@dataclass(frozen=True, slots=True)
class Median:
    """One contender over all rounds; `ratio` is its tokens per second over those of the first contender."""

    contender: str
    rows: int
    tokens_per_s: float
    ttft: float
    ratio: float
    spread: float
    """(fastest - slowest round) / median of tokens per second."""
    acceptance: float | None


def prompt_of(engine: Engine, tokens: int, images: Sequence[ImagePart] = (), text: str | None = None) -> Request:
    """A request with the given text, or whose prompt has as nearly `tokens` tokens as filler text allows.

    It has never more than `tokens`, unless the pictures alone do.
    """
    if text is not None:
        return Request((Message("user", (*images, TextPart(text))),))

    def sized(characters: int) -> Request:
        text = (FILLER * (characters // len(FILLER) + 1))[:characters]
        return Request((Message("user", (*images, TextPart(text))),))

    def fits(characters: int) -> bool:
        try:
            return engine.model.prepare(sized(characters)).length <= tokens
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return False

    few, many = 1, 2
    while fits(many):
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return sized(few)


def measure_engine(engine: Engine, request: Request, new_tokens: int, rows: int) -> Measured:
    """Serve `rows` copies of a request together. Raises the error of one that failed."""
    ends: list[Result | Failed] = []
    done = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ends.append(event.result if isinstance(event, Finished) else event)
            if len(ends) == rows:
                done.set()

    for _ in range(rows):
        copy = Request(request.messages, max_tokens=new_tokens, ignore_end=True)
        engine.submit(copy, sink)
    done.wait()
    results = []
    for end in ends:
        if isinstance(end, Failed):
            raise end.error
        results.append(end)
    # Of several rows, the time from the first one's first token to the last one's end is what all their tokens took.
    decode = max(result.timings.total for result in results) - min(result.timings.ttft for result in results)
    generated = sum(result.usage.completion_tokens for result in results) - 1
    proposed = sum(result.drafts.proposed for result in results)
    accepted = sum(result.drafts.accepted for result in results)
    return Measured(
        _name(engine),
        rows,
        generated / decode,
        min(result.timings.ttft for result in results),
        accepted / proposed if proposed else None,
    )


def measure_reference(
    engine: Engine, reference: Reference, request: Request, new_tokens: int, mode: ReferenceMode
) -> Measured:
    """Decode a request with the stock implementation, which serves one row."""
    prepared = engine.model.prepare(request)
    started = time.monotonic()
    run = reference.greedy(prepared, new_tokens, mode=mode, max_length=engine.config.max_length)
    logger.debug("%s took %.1f s", mode, time.monotonic() - started)
    return Measured(f"hf {mode}", 1, (new_tokens - 1) / run.decode_seconds, run.prefill_seconds)


def interleave(
    contenders: Sequence[Callable[[], Measured]], rounds: int, progress: Progress, *, warm_up: bool = True
) -> list[Median]:
    """Run every contender once per round, after one round that warms up and is not counted."""
    taken: list[list[Measured]] = [[] for _ in contenders]
    total = (rounds + warm_up) * len(contenders)
    for done in range(total):
        progress("measure", done, total)
        release_helpers()
        measured = contenders[done % len(contenders)]()
        if done >= len(contenders) * warm_up:
            taken[done % len(contenders)].append(measured)
    progress("measure", total, total)
    speeds = [statistics.median(one.tokens_per_s for one in measured) for measured in taken]
    return [
        Median(
            measured[0].contender,
            measured[0].rows,
            speed,
            statistics.median(one.ttft for one in measured),
            speed / speeds[0],
            (max(one.tokens_per_s for one in measured) - min(one.tokens_per_s for one in measured)) / speed,
            measured[-1].acceptance,
        )
        for measured, speed in zip(taken, speeds, strict=True)
    ]


def table(medians: Sequence[Median]) -> str:
    """The medians as a Markdown table."""
    lines = [
        "| contender | rows | tokens/s | ratio | TTFT ms | spread | drafts accepted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in medians:
        accepted = "" if one.acceptance is None else f"{one.acceptance:.0%}"
        lines.append(
            f"| {one.contender} | {one.rows} | {one.tokens_per_s:.1f} | {one.ratio:.2f} | {one.ttft * 1000:.0f} "
            f"| {one.spread:.0%} | {accepted} |"
        )
    return "\n".join(lines)


def _name(engine: Engine) -> str:
    name = f"kaminari {'compiled' if engine.config.compile else 'eager'}"
    return name if engine.config.draft == "none" else f"{name}, {engine.config.draft} {engine.config.draft_tokens}"


def report(engine: Engine, settings: dict[str, Any], medians: Sequence[Median]) -> dict[str, Any]:
    """Everything needed to read the figures later: the command, the machine, the versions, the settings."""
    return {
        **measured_where(engine.model.device),
        "model": {"name": engine.name, **asdict(engine.model.shape)},
        "config": asdict(engine.config),
        "settings": settings,
        "results": [asdict(one) for one in medians],
    }


def measured_where(device: torch.device) -> dict[str, Any]:
    """The command that made a figure, the day, the machine and the versions: the head of every report."""
    return {
        "command": shlex.join(["kaminari", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_facts(device),
        "versions": versions(),
    }


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What a figure depends on: processor, cores, threads, memory, card."""
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "load": os.getloadavg()[0],
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts |= {"card": card.name, "card_memory": card.total_memory, "cuda": torch.version.cuda}
    return facts


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that figures depend on."""
    found = {"python": platform.python_version()}
    for package in ("kaminari-core", "kaminari-qwen3vl", "torch", "torchao", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _processor() -> str:
    description = Path("/proc/cpuinfo")
    if description.exists():
        for line in description.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
