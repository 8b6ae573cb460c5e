"""Engines plan before they load: what cannot fit does not start, `--auto` starts with less, and a page that was not planned for
is refused with the numbers."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kaminari_core.cli import program
from kaminari_core.config import EngineConfig
from kaminari_core.errors import PageTooLargeError, UsageError
from kaminari_core.fit.memory import Budget
from kaminari_core.fit.start import planned
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import Registry
from kaminari_core.specs import ModelSpec
from kaminari_core.testing import TinyModel
from tests.conftest import turn

CONFIG = EngineConfig(device="cpu", compile=False)


@pytest.fixture
def folder(random_checkpoints: dict[str, Path]) -> Path:
    """The tiny Qwen3-VL."""
    return random_checkpoints["tiny"]


@pytest.fixture
def spec(registry: Registry) -> ModelSpec:
    """Its spec."""
    return registry.model("qwen3vl")


def test_what_fits_starts_as_it_was_asked_for(spec: ModelSpec, folder: Path) -> None:
    assert planned(spec, folder, CONFIG, "cpu") == CONFIG
    assert planned(spec, folder, replace(CONFIG, vram="2g"), "cpu").vram == "2g"


def test_what_cannot_fit_is_refused_with_the_numbers_and_the_options(spec: ModelSpec, folder: Path) -> None:
    asked = replace(CONFIG, slots=200, vram="1g")
    with pytest.raises(UsageError) as refused:
        planned(spec, folder, asked, "cpu")
    message = str(refused.value)
    assert "are needed" in message
    assert "1.00 GiB (--vram)" in message
    slots = int(message.partition("--slots ")[2].split(";")[0])
    assert planned(spec, folder, replace(asked, slots=slots), "cpu").slots == slots
    with pytest.raises(UsageError):
        planned(spec, folder, replace(asked, slots=slots + 1), "cpu")


def test_auto_starts_with_less_and_says_so(spec: ModelSpec, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = replace(CONFIG, slots=200, vram="1g", auto=True)
    found = planned(spec, folder, asked, "cpu")
    assert 1 <= found.slots < 200
    assert (found.max_length, found.page_tokens) == (asked.max_length, 0)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"--slots {found.slots}" in record.getMessage()
    assert "--slots 200" in record.getMessage()


def test_auto_cannot_help_where_nothing_fits(spec: ModelSpec, folder: Path) -> None:
    with pytest.raises(UsageError, match="Not even one slot"):
        planned(spec, folder, replace(CONFIG, vram="100m", auto=True), "cpu")


def test_no_plan_skips_it(spec: ModelSpec, folder: Path) -> None:
    asked = replace(CONFIG, vram="100m", plan=False)
    assert planned(spec, folder, asked, "cpu") == asked


def test_what_a_card_has_free_counts(spec: ModelSpec, folder: Path) -> None:
    free = Budget(2**20, "free on cuda:0", whole=False)
    with pytest.raises(UsageError, match="free on cuda:0"):
        planned(spec, folder, CONFIG, "cuda", on_card=free)
    assert planned(spec, folder, CONFIG, "cuda", on_card=replace(free, bytes=2**31)) == CONFIG


def test_a_model_without_a_footprint_starts_and_says_that_it_is_not_planned(
    spec: ModelSpec, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert planned(replace(spec, footprint=None), folder, replace(CONFIG, vram="1m"), "cpu").vram == "1m"
    assert "memory is not planned" in caplog.text


def test_run_refuses_before_anything_is_loaded(registry: Registry, folder: Path) -> None:
    asked = ["run", "--model", str(folder), "--vram", "100m", "--device", "cpu", "hello"]
    result = CliRunner().invoke(program(registry), asked)
    assert result.exit_code == 2
    assert "does not fit" in result.stderr
    assert result.stdout == ""


def test_an_engine_has_the_configuration_that_was_planned(registry: Registry, folder: Path) -> None:
    config = replace(CONFIG, slots=200, max_length=256, visual_tokens=16, vram="600m", auto=True)
    engine = open_engine(registry, "qwen3vl", str(folder), config, silent)
    try:
        assert engine.config.slots < 200
        assert engine.stats().slots == engine.config.slots
    finally:
        engine.close()


@pytest.mark.parametrize("sizing", ["bucket", "exact"])
def test_a_page_that_was_not_planned_for_is_refused_never_shrunk(sizing: str) -> None:
    config = replace(CONFIG, sizing=sizing, visual_tokens=64, page_tokens=16, max_length=512)  # type: ignore[arg-type]
    model = TinyModel(config)
    from kaminari_core.flow import Request

    small = model.prepare(Request((turn("user", (128, 128)),)))
    assert small.saw[0].visual_tokens == 16
    with pytest.raises(PageTooLargeError) as refused:
        model.prepare(Request((turn("user", (128, 128), (256, 256)),)))
    assert "256 x 256 pixels take 64 visual tokens" in str(refused.value)
    assert "at most 16" in str(refused.value)
    assert (refused.value.param, refused.value.code) == ("picture 1", "page_too_large")


def test_a_page_limit_below_the_smallest_picture_is_told() -> None:
    with pytest.raises(UsageError, match="page-tokens is 2"):
        TinyModel(replace(CONFIG, page_tokens=2, max_length=512))
    with pytest.raises(UsageError, match="page-tokens is -1"):
        replace(CONFIG, page_tokens=-1)


@pytest.mark.slow
def test_a_server_whose_engine_cannot_fit_ends_before_it_serves(registry: Registry, folder: Path) -> None:
    asked = ["serve", "--model", str(folder), "--vram", "100m", "--device", "cpu", "--port", "0"]
    result = CliRunner().invoke(program(registry), asked)
    assert result.exit_code == 2
    assert "does not fit" in result.stderr
    assert "serves" not in result.stdout
