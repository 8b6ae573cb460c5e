"""Grids of configurations: what an axis is, and a row for each combination, the impossible ones included."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.evaluation import plots
from kaminari_core.evaluation.run import Evaluation, run
from kaminari_core.evaluation.sets import read_set
from kaminari_core.evaluation.sweep import Row, baseline, change, configurations, parse_axes, sweep
from kaminari_core.evaluation.sweep_report import as_json, table
from kaminari_core.progress import silent

AXES = ("tokens=4,16,128", "sizing=bucket,exact")


@pytest.fixture(scope="module")
def rows(pages: Path) -> list[Row]:
    """A form, read with budgets of visual tokens that are too small for the model, for the page, and enough."""
    samples = read_set(pages)[:1]

    def evaluate(config: EngineConfig) -> Evaluation:
        return run("qwen3vl", "tiny", samples, "ocr", config)

    base = EngineConfig(compile=False, max_length=1024)
    return sweep(configurations(base, parse_axes(AXES)), evaluate, silent)


def test_the_last_axis_changes_fastest() -> None:
    found = configurations(EngineConfig(slots=2), parse_axes(["tokens=16,64", "compile=on,off", "draft=prompt-lookup"]))
    assert [values for values, _ in found] == [
        {"tokens": tokens, "compile": compiled, "draft": "prompt-lookup"}
        for tokens in ("16", "64")
        for compiled in ("on", "off")
    ]
    changed = {"visual_tokens": 16, "compile": False, "draft": "prompt-lookup"}
    assert asdict(found[1][1]) == {**asdict(EngineConfig(slots=2)), **changed}


def test_every_configuration_has_a_row(rows: list[Row]) -> None:
    assert [tuple(row.values.values()) for row in rows] == [
        (tokens, sizing) for tokens in ("4", "16", "128") for sizing in ("bucket", "exact")
    ]
    for row in rows[:2]:
        assert row.evaluation is None
        assert "takes at least 8 visual tokens" in str(row.error)
    for row in rows[2:]:
        assert row.evaluation is not None
        assert 0 < row.evaluation.visual_tokens <= int(row.values["tokens"])
        assert row.evaluation.config["sizing"] == row.values["sizing"]


def test_fewer_visual_tokens_than_a_page_needs_cost_accuracy(rows: list[Row]) -> None:
    few, enough = rows[2].evaluation, rows[4].evaluation
    assert few is not None
    assert enough is not None
    assert few.quality.text is not None
    assert enough.quality.text is not None
    assert enough.quality.text.cer < 0.1 < few.quality.text.cer


def test_the_table_and_the_record_say_the_same(rows: list[Row]) -> None:
    lines = table(rows).splitlines()
    records = as_json(rows)
    assert len(lines) == 2 + len(rows) == 2 + len(records)
    assert lines[2].startswith("| 4 | bucket | did not run: visual-tokens is 4")
    assert len({line.count(" | ") for line in lines}) == 1
    for line, record in zip(lines[4:], records[2:], strict=True):
        assert f"| {record['cer']:.2%}" in line
        assert f"| {record['pages_per_s']:.2f} |" in line
    assert records[0] == {"axes": {"tokens": "4", "sizing": "bucket"}, "error": rows[0].error}


def test_a_row_is_compared_with_the_first_value_of_the_first_axis(rows: list[Row]) -> None:
    assert [baseline(row, rows) for row in rows] == [rows[0], rows[1]] * 3
    grid = rows[2:]
    assert [baseline(row, grid) for row in grid] == [rows[2], rows[3]] * 2
    # Of one page nothing can be resampled, and nothing is compared with what did not run.
    assert [change(row, grid) for row in grid] == [change(row, rows) for row in rows[:4]] == [None] * 4


def test_the_change_is_that_of_the_same_pages(rows: list[Row]) -> None:
    few, enough = rows[2].evaluation, rows[4].evaluation
    assert few is not None
    assert enough is not None
    # Twice the same page: every draw is the same two pages, so the interval is the difference itself.
    doubled = [
        Row({"tokens": str(tokens)}, replace(evaluation, pages=evaluation.pages * 2))
        for tokens, evaluation in ((16, few), (128, enough))
    ]
    found = change(doubled[1], doubled)
    assert found is not None
    [read], [better] = few.pages, enough.pages
    assert read.score.text is not None
    assert better.score.text is not None
    difference = better.score.text.cer - read.score.text.cer
    assert found == (pytest.approx(difference), (pytest.approx(difference), pytest.approx(difference)))


def test_a_sweep_of_nothing_but_errors_is_one(rows: list[Row]) -> None:
    def refuse(config: EngineConfig) -> Evaluation:
        raise UsageError("no")

    with pytest.raises(UsageError, match="no configuration of the sweep can run; the first: no"):
        sweep(configurations(EngineConfig(), {"tokens": ["8"]}), refuse, silent)


def test_plots_are_the_same_for_the_same_figures(rows: list[Row], tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    for folder in (first, again):
        folder.mkdir()
        assert [file.name for file in plots.plot_sweep(rows, folder)] == ["cer.svg", "pages_per_s.svg", "memory.svg"]
    for file in first.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert plots.across(rows) == "tokens"
    assert plots.across([Row({"sizing": "exact", "slots": "1"}, None)]) == "sizing"


def test_without_matplotlib_the_extra_is_named(
    rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plots.is_available()
    with pytest.raises(UsageError, match=r"pip install 'kaminari-core\[plot\]'"):
        plots.plot_sweep(rows, tmp_path)
