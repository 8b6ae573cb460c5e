"""Takes the rungs in turns, round after round, within a time budget, and puts what was found side by side."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kaminari_core.bench import measured_where, prompt_of
from kaminari_core.config import EngineConfig
from kaminari_core.decode import SHORTEST_BUCKET
from kaminari_core.errors import KaminariError, UsageError
from kaminari_core.flow import Request
from kaminari_core.ladder.accuracy import LogitError, forced_logits, logit_error
from kaminari_core.ladder.bandwidth import ReadBandwidth, pages, step_bytes
from kaminari_core.ladder.contenders import Contenders, Turn
from kaminari_core.ladder.memory import peak_of
from kaminari_core.ladder.rungs import SOURCE, Rung
from kaminari_core.protocols import Progress
from kaminari_core.registry import Registry

logger = logging.getLogger(__name__)

SHORT = 64
"""Tokens of the prompt that warms up and that accuracy is measured behind: prefill is what a ladder spends its time on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: the workload, how many rounds at most, and within how many seconds in all."""

    rungs: Sequence[Rung]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    seconds: float
    memory: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Climbed:
    """One rung over all rounds: medians, and what stands beside them. Ratios are None where their baseline was not run."""

    name: str
    title: str
    rows: int
    settings: Mapping[str, Any]
    tokens_per_s: float
    spread: float
    ms_per_step: float
    tokens_per_step: float
    ttft: float
    ratio_dynamic: float | None
    ratio_static: float | None
    acceptance: float | None
    step_bytes: int | None
    bandwidth_share: float | None
    peak_memory: int | None
    logits: LogitError | None
    rounding: LogitError | None
    turns: Sequence[Turn]


def climb(
    registry: Registry,
    model: str,
    checkpoint: str | None,
    base: EngineConfig,
    packed: Mapping[str, Path],
    plan: Plan,
    progress: Progress,
) -> dict[str, Any]:
    """Measure a ladder; returns the report. Raises UsageError when not one rung of ours can be run."""
    ends = time.monotonic() + plan.seconds
    base = dataclasses.replace(base, max_length=max(SHORTEST_BUCKET, plan.prompt_tokens + plan.new_tokens))
    with Contenders(registry, model, checkpoint, base, packed, progress) as contenders:
        peaks = _peaks(contenders, plan, progress) if plan.memory else {}
        refused = contenders.load(plan.rungs)
        engine = contenders.engine(_ours(plan.rungs, refused)[0])
        short = prompt_of(engine, min(SHORT, plan.prompt_tokens))
        refused |= _warm_up(contenders, [rung for rung in plan.rungs if rung.name not in refused], short, progress)
        ours = _ours(plan.rungs, refused)
        rungs = [rung for rung in plan.rungs if rung.name not in refused]
        errors = _errors(contenders, ours, short)
        request = prompt_of(engine, plan.prompt_tokens)
        turns, bandwidths = _rounds(contenders, rungs, request, plan, ends, progress)
        bandwidth = statistics.median(bandwidths)
        climbed = _compare(contenders, rungs, turns, bandwidth, plan, peaks, errors)
        shape = engine.model.shape
        return {
            **measured_where(engine.model.device),
            "pages": pages(),
            "model": {"name": contenders.spec.name, "dtype": engine.config.dtype, **dataclasses.asdict(shape)},
            "settings": {
                "prompt_tokens": engine.model.prepare(request).length,
                "new_tokens": plan.new_tokens,
                "rounds": len(bandwidths),
                "seconds": round(plan.seconds - (ends - time.monotonic())),
            },
            "read_bandwidth": bandwidth,
            "read_bandwidths": bandwidths,
            "kv_bytes_per_position": 2 * shape.layers * shape.kv_heads * shape.head_dim * engine.model.dtype.itemsize,
            "rungs": [dataclasses.asdict(one) for one in climbed],
            "refused": refused,
        }


def _peaks(contenders: Contenders, plan: Plan, progress: Progress) -> dict[str, int]:
    """Peak memory of the rungs of one row that differ in weights or operators; before anything is loaded here."""
    peaks: dict[tuple[Any, ...], int] = {}
    found: dict[str, int] = {}
    rungs = [rung for rung in plan.rungs if rung.rows == 1 and rung.settings.get("draft") is None]
    for done, rung in enumerate(rungs):
        progress("memory", done, len(rungs))
        try:
            config = contenders.config(rung)
            key = rung.form, rung.settings.get("kernels"), rung.stock is None
            if key not in peaks:
                config = dataclasses.replace(config, slots=1, compile=False)
                arguments = (contenders.spec.name, contenders.folders[rung.form], config, plan.prompt_tokens)
                peaks[key] = peak_of(*arguments, torch.get_num_threads(), rung.stock is not None)
            found[rung.name] = peaks[key]
        except KaminariError as error:
            # Why it cannot be run is told where it is loaded.
            logger.debug("no peak memory of %s: %s", rung.name, error)
    progress("memory", len(rungs), len(rungs))
    return found


def _ours(rungs: Sequence[Rung], refused: Mapping[str, str]) -> list[Rung]:
    """The rungs of ours that can be run. Raises UsageError when there is none."""
    found = [rung for rung in rungs if rung.stock is None and rung.name not in refused]
    if not found:
        raise UsageError("no rung of kaminari's own can be run: " + ("; ".join(refused.values()) or "none was chosen"))
    return found


def _warm_up(contenders: Contenders, rungs: Sequence[Rung], request: Request, progress: Progress) -> dict[str, str]:
    """Let every rung decode a little; returns the reasons of those that fail."""
    refused = {}
    for done, rung in enumerate(rungs):
        progress("warm up", done, len(rungs))
        try:
            contenders.serve(rung, request, 3)
        except KaminariError as error:
            refused[rung.name] = str(error)
    progress("warm up", len(rungs), len(rungs))
    return refused


def _errors(
    contenders: Contenders, rungs: Sequence[Rung], request: Request
) -> dict[str, tuple[LogitError | None, LogitError]]:
    """Two logit errors of each rung: to the first rung with the published weights, and to the first with its own weights.

    The first is None where no rung has the published weights. The second is what its operators round, beside its weights.
    """
    logits: dict[int, Tensor] = {}
    for rung in rungs:
        model = contenders.model(rung)
        if id(model) not in logits:
            logits[id(model)] = forced_logits(model, model.prepare(request))
    found: dict[str, tuple[LogitError | None, LogitError]] = {}
    for rung in rungs:
        mine = logits[id(contenders.model(rung))]
        first = {form: _first(rungs, form) for form in (SOURCE, rung.form)}
        to = {
            form: logit_error(mine, logits[id(contenders.model(one))]) for form, one in first.items() if one is not None
        }
        found[rung.name] = to.get(SOURCE), to[rung.form]
    return found


def _first(rungs: Sequence[Rung], form: str) -> Rung | None:
    return next((rung for rung in rungs if rung.form == form), None)


def _rounds(
    contenders: Contenders, rungs: Sequence[Rung], request: Request, plan: Plan, ends: float, progress: Progress
) -> tuple[dict[str, list[Turn]], list[float]]:
    """Turns of every rung, and the bandwidth of every round. One round is always made; another only when it will fit."""
    turns: dict[str, list[Turn]] = {rung.name: [] for rung in rungs}
    bandwidth = ReadBandwidth(contenders.engine(next(rung for rung in rungs if rung.stock is None)).model.device)
    measured: list[float] = []
    longest = 0.0
    for made in range(plan.rounds):
        started = time.monotonic()
        if made and started + longest > ends:
            logger.warning("the time is up after %d of %d rounds", made, plan.rounds)
            break
        measured.append(bandwidth.measure())
        for done, rung in enumerate(rungs):
            progress("measure", made * len(rungs) + done, plan.rounds * len(rungs))
            turns[rung.name].append(contenders.serve(rung, request, plan.new_tokens))
        longest = max(longest, time.monotonic() - started)
    progress("measure", plan.rounds * len(rungs), plan.rounds * len(rungs))
    return turns, measured


def _compare(
    contenders: Contenders,
    rungs: Sequence[Rung],
    turns: Mapping[str, Sequence[Turn]],
    bandwidth: float,
    plan: Plan,
    peaks: Mapping[str, int],
    errors: Mapping[str, tuple[LogitError | None, LogitError]],
) -> list[Climbed]:
    speeds = {name: statistics.median(speed(turn) for turn in taken) for name, taken in turns.items()}
    live = plan.prompt_tokens + plan.new_tokens // 2
    found = []
    for rung in rungs:
        taken = turns[rung.name]
        step = statistics.median(turn.seconds / turn.steps for turn in taken)
        read = None if rung.stock else step_bytes(contenders.model(rung), rung.rows, live)
        every = [speed(turn) for turn in taken]
        found.append(
            Climbed(
                name=rung.name,
                title=rung.title,
                rows=rung.rows,
                settings=dict(rung.settings),
                tokens_per_s=speeds[rung.name],
                spread=(max(every) - min(every)) / speeds[rung.name],
                ms_per_step=1000 * step,
                tokens_per_step=statistics.median(turn.tokens / turn.steps for turn in taken),
                ttft=statistics.median(turn.ttft for turn in taken),
                ratio_dynamic=_ratio(speeds, rung.name, "hf-dynamic"),
                ratio_static=_ratio(speeds, rung.name, "hf-static"),
                acceptance=taken[-1].acceptance,
                step_bytes=read,
                bandwidth_share=None if read is None else read / step / bandwidth,
                peak_memory=peaks.get(rung.name),
                logits=errors[rung.name][0] if rung.name in errors else None,
                rounding=errors[rung.name][1] if rung.name in errors else None,
                turns=taken,
            )
        )
    return found


def speed(turn: Turn) -> float:
    """Tokens per second of all rows."""
    return turn.tokens / turn.seconds


def _ratio(speeds: Mapping[str, float], name: str, baseline: str) -> float | None:
    return speeds[name] / speeds[baseline] if baseline in speeds else None


TABLE: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("rung", lambda one: f"`{one['name']}`: {one['title']}"),
    ("rows", lambda one: str(one["rows"])),
    ("tokens/s", lambda one: f"{one['tokens_per_s']:.1f}"),
    ("x dynamic", lambda one: _number(one["ratio_dynamic"], ".2f")),
    ("x static", lambda one: _number(one["ratio_static"], ".2f")),
    ("ms/step", lambda one: f"{one['ms_per_step']:.1f}"),
    ("tokens/step", lambda one: f"{one['tokens_per_step']:.2f}"),
    ("TTFT ms", lambda one: f"{one['ttft'] * 1000:.0f}"),
    ("GB/step", lambda one: _number(one["step_bytes"], ".2f", 1e-9)),
    ("of bandwidth", lambda one: _number(one["bandwidth_share"], ".0%")),
    ("peak GB", lambda one: _number(one["peak_memory"], ".2f", 1e-9)),
    ("logit error", lambda one: "" if one["logits"] is None else f"{one['logits']['relative']:.1%}"),
    ("of rounding", lambda one: "" if one["rounding"] is None else f"{one['rounding']['relative']:.1%}"),
    ("spread", lambda one: f"{one['spread']:.0%}"),
)
"""Heads of the table and how each cell is written, for the terminal and for the document alike."""


def table(report: Mapping[str, Any]) -> str:
    """A report as a Markdown table, and below it what could not be run and why."""
    lines = [f"| {' | '.join(head for head, _ in TABLE)} |", "|" + " --- |" * len(TABLE)]
    lines += [f"| {' | '.join(cell(one) for _, cell in TABLE)} |" for one in report["rungs"]]
    if report["refused"]:
        lines += ["", "Not run:", ""]
        lines += [f"* `{name}`: {reason}" for name, reason in report["refused"].items()]
    return "\n".join(lines)


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)
