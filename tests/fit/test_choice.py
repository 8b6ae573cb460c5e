"""What fits: the answers are the largest that do, and lowering keeps to its order."""

from __future__ import annotations

import dataclasses

import pytest

from kaminari_core.config import EngineConfig
from kaminari_core.fit.cases import make_case, published
from kaminari_core.fit.choice import answer, flags, needed, page_size
from kaminari_core.fit.memory import Budget, given
from kaminari_core.fit.plan import Case, make_plan
from kaminari_core.registry import Registry

CONFIG = EngineConfig()


@pytest.fixture(scope="module")
def case(registry: Registry) -> Case:
    """The 2B shapes on a card."""
    spec = registry.model("qwen3vl")
    return make_case(spec, published(spec, "2b"), CONFIG, "cuda")


def fits(case: Case, config: EngineConfig, budget: Budget) -> bool:
    return needed(make_plan(case, config), budget) <= budget.bytes


def test_each_answer_is_the_largest_that_fits(case: Case) -> None:
    config, budget = dataclasses.replace(CONFIG, slots=1, max_length=8192), given("6g")
    found = answer(case, config, budget)
    assert found.fits
    assert found.start == config
    for name, value, step in (
        ("slots", found.slots, 1),
        ("max_length", found.length, 256),
        ("visual_tokens", found.page, 1),
    ):
        assert fits(case, dataclasses.replace(config, **{name: value}), budget)
        assert not fits(case, dataclasses.replace(config, **{name: value + step}), budget)


def test_slots_go_first_then_the_length_then_the_page(case: Case) -> None:
    asked = dataclasses.replace(CONFIG, slots=4, max_length=4096, visual_tokens=1024)
    kept = ("slots", "max_length", "page_tokens", "visual_tokens")

    def start(vram: str) -> tuple[int, ...] | None:
        found = answer(case, asked, given(vram)).start
        assert found is None or fits(case, found, given(vram))
        return None if found is None else tuple(getattr(found, name) for name in kept)

    assert start("8g") == (4, 4096, 0, 1024)
    slots, length, page, budget = start("6g") or ()
    assert 1 <= slots < 4
    assert (length, page, budget) == (4096, 0, 1024)
    slots, length, page, budget = start("5g") or ()
    assert slots == 1
    assert 1536 <= length < 4096
    assert (page, budget) == (0, 1024)
    slots, length, page, budget = start("4800m") or ()
    # A smaller page is refused by its own limit; what a picture is shrunk to stays what was asked for.
    assert slots == 1
    assert 0 < page < 1024
    assert budget == 1024
    assert length >= page + 512
    assert start("4400m") is None


def test_what_the_process_has_already_is_not_counted_twice(case: Case) -> None:
    plan = make_plan(case, CONFIG)
    whole, free = Budget(1, "", whole=True), Budget(1, "", whole=False)
    assert needed(plan, whole) - needed(plan, free) == plan.group("process") > 0


def test_a_page_of_a4(case: Case) -> None:
    # 210 x 297 mm at 200 dpi are 1654 x 2339 pixels: 52 x 73 squares of 32 pixels.
    width, height, dots = page_size(case, 52 * 73)
    assert (width, height, dots) == (52 * 32, 73 * 32, 200)


def test_the_options_of_an_answer() -> None:
    asked = EngineConfig(slots=4, max_length=4096)
    assert flags(dataclasses.replace(asked, slots=2), asked) == "--slots 2"
    assert flags(asked) == "--slots 4 --max-length 4096 --visual-tokens 512"
    assert "--page-tokens 128" in flags(dataclasses.replace(asked, page_tokens=128))
