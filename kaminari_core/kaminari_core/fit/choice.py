"""What fits: the largest page, the most slots and the longest text that a budget holds, and the configuration to start with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kaminari_core.config import EngineConfig
from kaminari_core.fit.memory import Budget
from kaminari_core.fit.plan import Case, Plan, make_plan

LENGTH_STEP = 256
"""Lengths are given in multiples of this."""
MOST_SLOTS = 256
ROOM = 512
"""Cache positions beside a page that a request needs at least: the words around it, and a reply worth having."""
A4_INCHES = 210 * 297 / 25.4**2


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan held against a budget.

    `slots`, `length` and `page` (visual tokens) are the most that fits when the other two stay as they are; 0 where nothing does.
    `start` is the configuration nearest to what was asked for that fits, None when not even one slot with the smallest page does.
    """

    plan: Plan
    budget: Budget
    fits: bool
    slots: int
    length: int
    page: int
    start: EngineConfig | None

    @property
    def needed(self) -> int:
        """Bytes of the budget that the plan takes."""
        return needed(self.plan, self.budget)


def needed(plan: Plan, budget: Budget) -> int:
    """Bytes that a plan takes of a budget, which may have the process itself in it or not."""
    return plan.total - (0 if budget.whole else plan.group("process"))


def answer(case: Case, config: EngineConfig, budget: Budget) -> Answer:
    """Hold a configuration against a budget, and say what fits."""
    plan = make_plan(case, config)

    def fits(**changes: Any) -> bool:
        return needed(make_plan(case, dataclasses.replace(config, **changes)), budget) <= budget.bytes

    return Answer(
        plan=plan,
        budget=budget,
        fits=needed(plan, budget) <= budget.bytes,
        slots=_most(MOST_SLOTS, lambda slots: fits(slots=slots)),
        length=_longest(case, lambda length: fits(max_length=length)),
        page=_largest_page(case, config, lambda page: fits(visual_tokens=page, page_tokens=0)),
        start=nearest(case, config, budget),
    )


def nearest(case: Case, config: EngineConfig, budget: Budget) -> EngineConfig | None:
    """The configuration to start with: fewer slots first, then a shorter length, then a smaller largest page.

    A page is lowered by `page_tokens`, so that a picture that needs more is refused: `visual_tokens` would shrink it.
    """

    def fits(candidate: EngineConfig) -> bool:
        return needed(make_plan(case, candidate), budget) <= budget.bytes

    if fits(config):
        return config
    slots = _most(config.slots, lambda count: fits(dataclasses.replace(config, slots=count)))
    if slots:
        return dataclasses.replace(config, slots=slots)
    for page in _pages(case, config):
        lowered = config.page_tokens if page == _asked_page(case, config) else page
        single = dataclasses.replace(config, slots=1, page_tokens=lowered)
        length = LENGTH_STEP * _most(config.max_length // LENGTH_STEP, partial(_fits_steps, case, single, budget))
        if length >= min(config.max_length, _rounded_up(page + ROOM)):
            return dataclasses.replace(single, max_length=length)
    return None


def page_size(case: Case, tokens: int) -> tuple[int, int, int]:
    """Width and height in pixels of an upright A4 page of so many visual tokens at most, and its dots per inch."""
    picture = case.footprint.picture
    assert picture is not None, "a text-only model has no page"
    rows = max(1, int(math.sqrt(tokens * 297 / 210)))
    columns = max(1, tokens // rows)
    pixels = rows * columns * picture.unit**2
    return columns * picture.unit, rows * picture.unit, int(math.sqrt(pixels / A4_INCHES))


def flags(config: EngineConfig, asked: EngineConfig | None = None) -> str:
    """The options that make a configuration, those of the plan's sizes only; with `asked`, those that differ from it."""
    names = ("slots", "max_length", "visual_tokens", "page_tokens")
    shown = [name for name in names if asked is None or getattr(config, name) != getattr(asked, name)]
    return " ".join(f"--{name.replace('_', '-')} {getattr(config, name)}" for name in shown if getattr(config, name))


def _fits_steps(case: Case, config: EngineConfig, budget: Budget, steps: int) -> bool:
    """Whether a length of so many steps fits."""
    plan = make_plan(case, dataclasses.replace(config, max_length=steps * LENGTH_STEP))
    return needed(plan, budget) <= budget.bytes


def _largest_page(case: Case, config: EngineConfig, fits: Callable[[int], bool]) -> int:
    picture = case.footprint.picture
    if picture is None:
        return 0
    most = max(0, min(config.max_length - ROOM // 2, picture.most or config.max_length))
    page = _most(most, fits)
    return page if page >= picture.least else 0


def _longest(case: Case, fits: Callable[[int], bool]) -> int:
    most = case.footprint.max_positions
    steps = _most(most // LENGTH_STEP, lambda count: fits(count * LENGTH_STEP))
    return steps * LENGTH_STEP if most >= LENGTH_STEP else most * fits(most)


def _pages(case: Case, config: EngineConfig) -> list[int]:
    """The page that was asked for, and smaller ones down to the model's smallest."""
    picture = case.footprint.picture
    page = _asked_page(case, config)
    found = [page]
    while picture is not None and page // 2 >= picture.least:
        page //= 2
        found.append(page)
    return found


def _asked_page(case: Case, config: EngineConfig) -> int:
    picture = case.footprint.picture
    if picture is None:
        return 0
    most = min(config.visual_tokens, picture.most or config.visual_tokens)
    return min(most, config.page_tokens) if config.page_tokens else most


def _rounded_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number of 1 .. limit that fits, 0 when none does. What fits for a number fits for all below it."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
