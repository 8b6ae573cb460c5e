"""A plan for people and for programs: the table of `kaminari fit`, its JSON, and the message of a refusal to start."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kaminari_core.config import EngineConfig
from kaminari_core.fit.choice import Answer, answer, flags, needed, page_size
from kaminari_core.fit.memory import Budget
from kaminari_core.fit.plan import Case, Part, Plan

GIB, MIB = 2**30, 2**20
TITLES = {"weights": "weights", "cache": "cache", "work": "work", "reserve": "reserve", "process": "process"}
PHASES = {"vision": "while a picture is seen", "prefill": "while a prompt is read", "decode": "while tokens are made",
          "loading": "while weights load"}  # fmt: skip


def size(count: int) -> str:
    """Bytes in GiB, MiB or KiB."""
    if count >= GIB / 10:
        return f"{count / GIB:.2f} GiB"
    if count >= MIB / 10:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.0f} KiB" if count else "-"


def page_text(case: Case, tokens: int) -> str:
    """A page of so many visual tokens in words."""
    if not tokens:
        return "none"
    width, height, dots = page_size(case, tokens)
    return f"{tokens:,} tokens, {width} x {height} pixels, A4 at {dots} dpi"


def table(found: Answer, title: str) -> str:
    """The whole answer as text."""
    lines = [title, "", *_parts(found.plan), "", *_verdict(found), "", *_choices(found)]
    return "\n".join(lines)


def facts(found: Answer) -> dict[str, Any]:
    """The whole answer as JSON; sizes are bytes."""
    plan = found.plan
    return {
        "device": plan.case.device,
        "dtype": plan.case.dtype,
        "budget": dataclasses.asdict(found.budget),
        "asked": _sizes(plan.config),
        "parts": [dataclasses.asdict(part) for part in plan.parts],
        "phases": plan.phases,
        "token_bytes": plan.token_bytes,
        "allocated": plan.allocated,
        "total": plan.total,
        "needed": found.needed,
        "fits": found.fits,
        "largest_page": _page_facts(plan.case, found.page),
        "most_slots": found.slots,
        "longest_length": found.length,
        "start": None if found.start is None else _sizes(found.start),
        "flags": None if found.start is None else flags(found.start),
        "notes": list(plan.case.weights.notes),
    }


def refusal(found: Answer) -> str:
    """Why this cannot be started, and what can."""
    plan = found.plan
    held = f"weights {size(plan.case.weights.total)}, cache {size(plan.group('cache'))}"
    text = (
        f"this does not fit: {size(found.needed)} are needed ({held}, the rest work and reserve), but there are "
        f"{size(found.budget.bytes)} ({found.budget.source})"
    )
    if found.start is None:
        return f"{text}. Not even one slot with the smallest picture fits; quantize the weights, or use a smaller model"
    return f"{text}. What fits: {flags(found.start, plan.config)}; --auto chooses it, --no-plan starts all the same"


def _parts(plan: Plan) -> Iterator[str]:
    for group, title in TITLES.items():
        for phase in ("always", *PHASES):
            parts = [part for part in plan.parts if part.group == group and part.phase == phase]
            if parts and phase != "always":
                yield f"{'':10}{PHASES[phase]}: {size(sum(part.bytes for part in parts))}"
            for part in parts:
                yield _line(title if part is _first(plan, group) else "", part, indent=2 * (phase != "always"))
    yield f"{'total':10}{'the largest phase counts':28}{size(plan.total):>12}"


def _first(plan: Plan, group: str) -> Part:
    return next(part for part in plan.parts if part.group == group)


def _line(title: str, part: Part, *, indent: int) -> str:
    name = " " * indent + part.name
    return f"{title:10}{name:28}{size(part.bytes):>12}  {part.note}".rstrip()


def _verdict(found: Answer) -> Iterator[str]:
    budget = found.budget
    beside = "" if budget.whole else ", beside what this process has already"
    yield f"{size(found.needed)} of {size(budget.bytes)} ({budget.source}){beside}: {'fits' if found.fits else 'does not fit'}"
    for note in found.plan.case.weights.notes:
        yield f"note: {note}"


def _choices(found: Answer) -> Iterator[str]:
    plan = found.plan
    case, config = plan.case, plan.config
    yield "What fits, when the rest stays as asked"
    if case.footprint.picture is not None:
        yield f"{'':2}{'largest page':18}{page_text(case, found.page)}"
    yield f"{'':2}{'most slots':18}{found.slots or 'none'}"
    yield (
        f"{'':2}{'longest length':18}{found.length or 'none':,}" if found.length else f"{'':2}{'longest length':18}none"
    )
    yield ""
    yield f"{'slots':>7}{'longest length':>16}  largest page at --max-length {config.max_length}"
    for slots in (1, 2, 4, 8, 16):
        other = answer(case, dataclasses.replace(config, slots=slots), found.budget)
        length = f"{other.length:,}" if other.length else "none"
        yield f"{slots:>7}{length:>16}  {page_text(case, other.page) if case.footprint.picture else ''}".rstrip()
    yield ""
    if found.start is None:
        yield "Nothing fits: quantize the weights, or use a smaller model."
    else:
        yield f"Start with: {flags(found.start)}"


def summary(found: Answer, name: str) -> str:
    """One line of the table over several sizes of a model."""
    start = "nothing fits" if found.start is None else flags(found.start)
    weights = size(found.plan.case.weights.total)
    return (
        f"{name:12}{weights:>10}{size(needed(found.plan, found.budget)):>11}  {'yes' if found.fits else 'no':5}{start}"
    )


def summary_head(budget: Budget) -> str:
    """The heading over those lines."""
    return f"{'size':12}{'weights':>10}{'needed':>11}  {'fits':5}start with ({size(budget.bytes)}, {budget.source})"


def _sizes(config: EngineConfig) -> dict[str, int | str]:
    names = ("slots", "max_length", "visual_tokens", "page_tokens", "prefill_chunk", "draft", "quantizer")
    return {name: getattr(config, name) for name in names}


def _page_facts(case: Case, tokens: int) -> dict[str, int] | None:
    if not tokens:
        return None
    width, height, dots = page_size(case, tokens)
    return {"tokens": tokens, "width": width, "height": height, "a4_dpi": dots}
