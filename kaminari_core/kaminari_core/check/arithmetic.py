"""Items about numbers: the same logits as the stock implementation, however the prompt is cut and whatever the cache held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from kaminari_core.check.compared import Difference, difference
from kaminari_core.check.hypotheses import explain
from kaminari_core.check.outcome import Outcome, judged, not_applicable
from kaminari_core.check.subject import Subject
from kaminari_core.flow import Prepared
from kaminari_core.parity import greedy
from kaminari_core.protocols import ReferenceRun

CHUNKS = (7, 16)
_NO_REFERENCE = "the plugin names no reference"


def logits(subject: Subject) -> Outcome:
    """The prompt's logits in float32 equal those of the stock implementation."""
    if subject.reference is None:
        return not_applicable(_NO_REFERENCE)
    found = subject.differences()
    return _against_reference(subject, {name: each.prefill for name, each in found.items()}, found)


def decoding(subject: Subject) -> Outcome:
    """So do those of every greedy step after it."""
    if subject.reference is None:
        return not_applicable(_NO_REFERENCE)
    found = subject.differences()
    return _against_reference(subject, {name: each.decode for name, each in found.items()}, found, decode=True)


def _against_reference(
    subject: Subject, apart: Mapping[str, float], found: Mapping[str, Difference], *, decode: bool = False
) -> Outcome:
    tolerance, worst = subject.settings.tolerance, max(apart.values())
    steps = sum(each.steps - 1 for each in found.values())
    over = f"over {steps} decode steps of {len(apart)} prompts" if decode else f"over {len(apart)} prompts"
    detail = f"max logit difference {worst:.2g} {over} (tolerance {tolerance:g})"
    if worst <= tolerance:
        return judged(True, detail, max_difference=worst, prompts=len(apart), steps=steps if decode else 0)
    where = ", ".join(f"{name} {value:.2g}" for name, value in apart.items())
    return judged(False, f"{detail}: {where}", explain(subject), max_difference=worst, prompts=len(apart))


def cached_prefix(subject: Subject) -> Outcome:
    """A decode step over the cache equals running the whole text so far as one prompt."""
    worst, compared = 0.0, 0
    for prepared in subject.prepared.values():
        run = greedy(subject.model, prepared, subject.settings.steps)
        tokens = run.tokens[: _usable(prepared, run)]
        for count in sorted({1, len(tokens) // 2, len(tokens) - 1} - {0, -1}):
            again = greedy(subject.model, continued(prepared, tokens[:count]), 1)
            assert run.logits is not None and again.logits is not None, "greedy keeps logits"
            worst = max(worst, float((run.logits[count] - again.logits[0]).abs().max().nan_to_num(nan=torch.inf)))
            compared += 1
    suspect = (
        "keys or values stored elsewhere than at the cursor, or a step that rotates by another position than prefill"
    )
    return judged(
        worst <= subject.settings.tolerance,
        f"max logit difference {worst:.2g} between {compared} decode steps and recomputed prefixes",
        [suspect],
        max_difference=worst,
        prefixes=compared,
    )


def chunked_prefill(subject: Subject) -> Outcome:
    """Prefill in chunks equals prefill at once, for the prompt's logits and for what is decoded from the cache it left."""
    steps = min(4, subject.settings.steps)
    worst, compared = 0.0, 0
    for prepared in subject.prepared.values():
        whole = greedy(subject.model, prepared, steps)
        for chunk in CHUNKS:
            worst = max(worst, difference(greedy(subject.model, prepared, steps, chunk=chunk), whole).worst)
            compared += 1
    suspects = ["a chunk after the first that ignores `start`: its positions, its mask, or the rows added after layers"]
    return judged(
        worst <= subject.settings.tolerance,
        f"max logit difference {worst:.2g} between prefill in chunks of {' and '.join(map(str, CHUNKS))} and at once, "
        f"{compared} runs",
        suspects,
        max_difference=worst,
        runs=compared,
    )


def continued(prepared: Prepared, tokens: tuple[int, ...]) -> Prepared:
    """The prompt with generated tokens behind it."""
    following = prepared.next_position + torch.arange(len(tokens))
    return replace(
        prepared,
        tokens=prepared.tokens + tokens,
        positions=torch.cat([prepared.positions, following.expand(len(prepared.positions), -1)], dim=1),
        next_position=prepared.next_position + len(tokens),
    )


def _usable(prepared: Prepared, run: ReferenceRun) -> int:
    """How many generated tokens may stand in a prompt: those before one that would claim a picture."""
    placeholders = placeholder_runs(prepared)
    kinds = {prepared.tokens[start] for start, _ in placeholders}
    return next((count for count, token in enumerate(run.tokens) if token in kinds), len(run.tokens))


def placeholder_runs(prepared: Prepared) -> list[tuple[int, int]]:
    """Where (start, stop) each picture's visual tokens stand: the next run of one repeated token of just that length."""
    runs: list[tuple[int, int]] = []
    start = 0
    for saw in prepared.saw:
        count = saw.visual_tokens
        while start + count <= prepared.length and not _is_run(prepared.tokens, start, count):
            start += 1
        if start + count > prepared.length:
            return runs
        runs.append((start, start + count))
        start += count
    return runs


def _is_run(tokens: tuple[int, ...], start: int, count: int) -> bool:
    stop = start + count
    alone = (start == 0 or tokens[start - 1] != tokens[start]) and (
        stop == len(tokens) or tokens[stop] != tokens[start]
    )
    return alone and len(set(tokens[start:stop])) == 1
