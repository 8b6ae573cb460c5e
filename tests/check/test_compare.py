"""`kaminari compare`: sets of pages in both layouts, one row of figures per model, and a JSON report that repeats the table."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kaminari_core.cli import program
from kaminari_core.evaluation.sets import read_set
from kaminari_core.evaluation.text_score import score_text
from kaminari_core.registry import Registry

LINES = Path(__file__).parent.parent / "qwen3vl" / "data" / "lines"
FAST = ("--no-compile", "--max-length", "256", "--max-tokens", "8", "--dtype", "float32")


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """Two pages with a text beside each, and a file that is none."""
    folder = tmp_path / "pages"
    folder.mkdir()
    truths = json.loads((LINES / "truths.json").read_text())
    for name in ("line-00.png", "line-01.png"):
        shutil.copy(LINES / name, folder)
        (folder / name).with_suffix(".txt").write_text(truths[name] + "\n")
    (folder / "notes.txt").write_text("not a page")
    return folder


def compare(registry: Registry, *options: str | Path) -> Result:
    return CliRunner().invoke(program(registry), ["compare", *map(str, options), *FAST])


def test_two_models_on_one_table(registry: Registry, folders: dict[str, Path], pages: Path, tmp_path: Path) -> None:
    (pages / "broken.png").write_bytes(b"no picture")
    (pages / "broken.txt").write_text("abc")
    checkpoints = f"{folders['tiny']},{folders['tiny-glmocr']}"
    out = tmp_path / "out"
    result = compare(
        registry, "--models", "qwen3vl,glmocr", "--checkpoints", checkpoints, "--set", pages, "--out", out,
        "--visual-tokens", "16",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    text = (out / "compare.md").read_text()
    assert text in result.stdout
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == ["| qwen3vl", "| glmocr"]
    report = json.loads((out / "compare.json").read_text())
    assert report["visual_tokens"] == 16
    for model in report["models"]:
        truths = {page.name: page.text for page in read_set(pages)}
        assert [page["page"] for page in model["pages"]] == ["broken.png", "line-00.png", "line-01.png"]
        for page in model["pages"]:
            assert page["score"]["text"] == asdict(score_text(page["text"], truths[page["page"]]))
            assert page["visual_tokens"] <= 16
        refused = model["pages"][0]
        assert "broken.png" in refused["error"]
        assert (refused["status"], refused["text"], refused["score"]["text"]["deleted"]) == ("failed", "", 3)
        assert all(page["tokens"] == 8 for page in model["pages"][1:])
        counts = [page["score"]["text"] for page in model["pages"]]
        edits = sum(count[kind] for count in counts for kind in ("inserted", "deleted", "substituted"))
        assert model["quality"]["cer"] == edits / sum(count["characters"] for count in counts)
        assert [model["quality"][kind] for kind in ("pages", "read", "failed")] == [3, 2, 1]
        assert model["memory"] > 50e6
        assert model["tokens_per_s"] * model["seconds"] == pytest.approx(16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--models", "qwen3vl,qwen3vl", "--checkpoints", "tiny"), "--models names 2, --checkpoints 1"),
        (("--models", "whisper"), "There is no model 'whisper'"),
        (("--models", "qwen3vl", "--task", "sing"), "no task of qwen3vl 'sing'"),
        (("--models", "glmocr", "--checkpoints", "GLM", "--task", "extract"), "needs a template"),
        (("--models", "Whole"), "Whole brings no checkpoint"),
    ],
)
def test_names_are_told_before_anything_is_loaded(
    registry: Registry, folders: dict[str, Path], pages: Path, options: tuple[str, ...], message: str
) -> None:
    given = [str(folders["tiny-glmocr"]) if option == "GLM" else option for option in options]
    result = compare(registry, *given, "--set", pages)
    assert result.exit_code == 2, result.output
    assert message in result.output
