"""`kaminari eval` end to end: what it prints and writes, from the bundled reader's own replies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jiwer
import pytest
from click.testing import Result

from kaminari_core.evaluation.fields import score_fields
from kaminari_core.evaluation.sets import read_set
from kaminari_core.evidence.calibration import Calibration


@pytest.fixture(scope="module")
def evaluated(pages: Path, run_eval: Callable[..., Result], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the reports, and what was printed as printed.txt."""
    out = tmp_path_factory.mktemp("reports")
    result = run_eval("--set", pages, "--out", out)
    assert result.exit_code == 0, result.output
    (out / "printed.txt").write_text(result.stdout)
    return out


@pytest.fixture(scope="module")
def record(evaluated: Path) -> dict[str, Any]:
    """The JSON report."""
    found: dict[str, Any] = json.loads((evaluated / "eval.json").read_text())
    return found


def test_every_page_is_accounted_for(record: dict[str, Any], pages: Path) -> None:
    samples = read_set(pages)
    assert [page["page"] for page in record["pages"]] == [sample.name for sample in samples]
    assert {page["page"]: page["status"] for page in record["pages"]} == {
        "form-00.png": "read",
        "table-00.png": "read",
        "blank-00.png": "blank",
        "broken.png": "failed",
    }
    quality = record["quality"]
    assert quality["pages"] == quality["read"] + quality["blank"] + quality["failed"] == 4


def test_rates_are_over_all_pages_the_failed_one_included(record: dict[str, Any], pages: Path) -> None:
    truths = [sample.text or "" for sample in read_set(pages)]
    read = [page["text"] for page in record["pages"]]
    # The blank page has no truth and no text, which adds nothing; the broken one was read as nothing.
    assert record["quality"]["cer"] == pytest.approx(jiwer.cer(truths, read))
    assert record["pages"][-1]["score"]["text"]["deleted"] == len(truths[-1])
    low, high = record["quality"]["cer_interval"]
    assert low <= record["quality"]["cer"] <= high
    assert record["groups"]["broken"]["cer"] == 1
    form = next(page for page in record["pages"] if page["group"] == "form")
    assert record["groups"]["form"]["field_f1"] == score_fields(form["text"], read_set(pages)[0].fields).f1 > 0.8
    # The reader writes a table as lines: its text is right, and there is no table.
    assert record["quality"]["teds"] == 0
    assert record["groups"]["table"]["cer"] < 0.3


def test_speed_and_provenance_are_there(record: dict[str, Any]) -> None:
    tokens = sum(page["tokens"] for page in record["pages"])
    assert record["tokens_per_s"] * record["seconds"] == pytest.approx(tokens)
    assert record["pages_per_s"] * record["seconds"] == pytest.approx(4)
    assert record["memory"] > 50e6
    assert record["set"] == {"name": "pages", "pages": 4}
    assert {"command", "date", "versions", "machine", "config"} <= record.keys()


def test_the_markdown_is_what_is_printed(evaluated: Path) -> None:
    printed = (evaluated / "printed.txt").read_text()
    assert (evaluated / "eval.md").read_text().startswith(printed)
    assert "; torch " in (evaluated / "eval.md").read_text().splitlines()[-1]
    assert "| pages | 4 = 2 read + 1 blank + 1 failed |" in printed
    assert "* broken.png: broken.png: " in printed


def test_the_html_needs_nothing_else_and_shows_the_worst_pages(evaluated: Path) -> None:
    text = (evaluated / "eval.html").read_text()
    places = re.findall(r"(?:src|href|action)\s*=\s*['\"]?([^'\" >]+)", text)
    assert places
    assert all(place.startswith("data:image/") for place in places)
    assert "<script" not in text
    assert "url(" not in text
    # The page that failed comes first, with its reason and the whole truth as missing; blank paper was read without a fault.
    assert text.index("<h3>broken.png") < text.index("<h3>table-00.png")
    assert "<h3>blank-00.png" not in text
    assert "<del>three&#9166;\nlines &amp; &lt;b&gt;more&lt;/b&gt;</del>" in text


@pytest.mark.slow
def test_a_sweep_packs_what_its_quantizers_need(pages: Path, run_eval: Callable[..., Result], tmp_path: Path) -> None:
    options = ("--set", pages, "--limit", "2", "--out", tmp_path, "--packed", tmp_path / "packed", "--sweep")
    first = run_eval(*options, "quantizer=none,int8,int4")
    assert first.exit_code == 0, first.output
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["config"]["quantizer"] for row in rows] == ["none", "int8", "int4"]
    assert len(first.stdout.splitlines()) == 2 + 3
    assert (tmp_path / "cer.svg").is_file()
    packed = {file: file.stat().st_mtime_ns for file in (tmp_path / "packed").rglob("*") if file.is_file()}
    again = run_eval(*options, "quantizer=int4,int8")
    assert again.exit_code == 0, again.output
    assert {file: file.stat().st_mtime_ns for file in packed} == packed


def test_a_calibration_is_written_as_serving_reads_it(
    pages: Path, run_eval: Callable[..., Result], tmp_path: Path
) -> None:
    result = run_eval("--set", pages, "--out", tmp_path, "--calibrate")
    assert result.exit_code == 0, result.output
    measures = json.loads((tmp_path / "calibration-report.json").read_text())["measures"]
    best = min(measures, key=lambda each: float(each["loss"][1]))
    written = Calibration.read(tmp_path / "calibration.json")
    assert (written.measure, written.temperature) == (best["measure"], best["temperature"])
    assert (written.model, written.data) == ("qwen3vl", "pages")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sweep",), "--sweep takes the axes of a grid"),
        (("tokens=64",), "--sweep takes the axes of a grid"),
        (("--sweep", "--calibrate", "tokens=64"), "excludes --calibrate"),
        (
            ("--sweep", "colour=red"),
            "'colour=red' is no axis of a sweep; it takes NAME=VALUE,VALUE, NAME one of: tokens, dev",
        ),
        (("--sweep", "tokens=64,64"), "needs values, each of them once"),
        (("--sweep", "tokens=64", "tokens=32"), "an axis is given twice"),
        (("--sweep", "tokens=many"), "visual-tokens in the sweep is 'many', but must be of the kind int"),
        (("--sweep", "compile=perhaps"), "compile in the sweep is 'perhaps', but must be on or off"),
        (("--sweep", "sizing=round"), "sizing is 'round'; choose bucket or exact"),
        (("--task", "sing"), "no task of qwen3vl 'sing'"),
        (("--layout", "coco"), "there is no layout 'coco'"),
    ],
)
def test_what_cannot_be_evaluated_is_told(
    pages: Path, run_eval: Callable[..., Result], options: tuple[str, ...], message: str
) -> None:
    result = run_eval("--set", pages, *options)
    assert result.exit_code == 2, result.output
    assert message in result.output
