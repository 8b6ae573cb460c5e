"""Samples through an engine: each is answered once, in order, with its own question where it has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.evaluation.reading import read_samples
from kaminari_core.evaluation.sets import read_set
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(compile=False, max_length=512, max_tokens=4, slots=2)
    opened = open_engine(load_registry(), "qwen3vl", "tiny", config, silent)
    yield opened
    opened.close()


def test_a_question_is_asked_in_place_of_the_task(engine: Engine, pages: Path) -> None:
    form = read_set(pages)[0]
    question = "What stands here, on the first line?"
    asked = replace(form, name="asked", question=question, answers=("x",))
    plain, own = read_samples(engine, [form, asked], "ocr", silent)
    # One token is one byte in the bundled checkpoint.
    difference = len(question) - len(engine.tasks["ocr"])
    assert own.page.usage.prompt_tokens - plain.page.usage.prompt_tokens == difference


def test_blank_paper_is_asked_about_only_when_it_has_a_question(engine: Engine, pages: Path) -> None:
    blank = next(sample for sample in read_set(pages) if sample.group == "blank")
    asked = replace(blank, name="asked", question="Is there anything?", answers=("no",))
    unasked, own = read_samples(engine, [blank, asked], "ocr", silent)
    assert (unasked.status, unasked.page.results) == ("blank", ())
    assert len(own.page.results) == 1


def test_more_samples_than_slots_keep_their_order_and_their_failures(engine: Engine, pages: Path) -> None:
    samples = [replace(sample, name=f"{number} {sample.name}") for number in range(3) for sample in read_set(pages)]
    steps: list[tuple[int, int]] = []
    found = read_samples(engine, samples, "ocr", lambda stage, done, total: steps.append((done, total)))
    assert [outcome.sample for outcome in found] == samples
    assert [outcome.status for outcome in found] == ["read", "read", "blank", "failed"] * 3
    texts = [outcome.page.text for outcome in found]
    assert texts[:4] == texts[4:8] == texts[8:]
    assert steps[-1] == (12, 12)


def test_confidence_is_there_when_it_is_asked_for(engine: Engine, pages: Path) -> None:
    form = read_set(pages)[:1]
    [sure] = read_samples(engine, form, "ocr", silent, confidence=True)
    [unsure] = read_samples(engine, form, "ocr", silent)
    assert "\n".join(line.text for line in sure.page.lines) == sure.page.text == unsure.page.text
    assert unsure.page.lines == ()
