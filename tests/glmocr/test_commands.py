"""`kaminari run` with this model: tasks, templates, the draft head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from kaminari_core.cli import program
from kaminari_core.registry import load_registry

Run = Callable[..., Result]


@pytest.fixture
def run(tiny_random: Path, tmp_path: Path) -> Run:
    """A function that answers one request about a picture and returns what the program printed."""
    Image.new("RGB", (120, 80), "navy").save(tmp_path / "page.png")

    def answer(*words: str, checkpoint: Path = tiny_random) -> Result:
        base = ["run", "--model", "glmocr", "--checkpoint", str(checkpoint), "--no-compile", "--visual-tokens", "32"]
        picture = ["--image", str(tmp_path / "page.png"), "--max-tokens", "9", "--json"]
        registry = load_registry(only=frozenset({"core", "glmocr"}))
        return CliRunner().invoke(program(registry), [*base, *picture, *words])

    return answer


def test_a_template_is_given_inline_or_as_a_file(run: Run, tmp_path: Path) -> None:
    template = '{"name": "", "born": {"year": ""}}'
    inline = run("--task", "extract", "--template", template)
    assert inline.exit_code == 0, inline.output
    (tmp_path / "fields.json").write_text(template)
    file = run("--task", "extract", "--template", str(tmp_path / "fields.json"))
    first, second = (json.loads(each.stdout) for each in (inline, file))
    assert first["text"] == second["text"]
    assert first["usage"] == second["usage"]
    assert first["usage"]["prompt_tokens"] > json.loads(run("--task", "table").stdout)["usage"]["prompt_tokens"]


def test_pictures_alone_are_read_and_drafting_changes_nothing(run: Run) -> None:
    plain = json.loads(run().stdout)
    assert json.loads(run("--task", "ocr").stdout)["text"] == plain["text"]
    assert json.loads(run("--draft", "mtp", "--draft-tokens", "2").stdout)["text"] == plain["text"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "extract"], "--template: the task 'extract' needs a JSON template"),
        (["--task", "ocr", "--template", '{"a": ""}'], "--template: the task 'ocr' takes no template"),
        (["--template", '{"a": ""}', "Read."], "--template belongs to a --task"),
        (["--task", "extract", "--template", '{"a": "'], "the template is no JSON"),
        (["--task", "extract", "--template", "none.json"], "the template file 'none.json' cannot be read"),
        (["--task", "extract", "--template", '{"a": "total"}'], '--template: template.a is "total"'),
        (["--task", "extrac"], "no task of glmocr 'extrac'. Did you mean 'extract'?"),
    ],
)
def test_what_is_no_template_ends_with_exit_code_2(run: Run, words: list[str], message: str) -> None:
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_checkpoint_without_a_draft_head(run: Run, without_head: Path) -> None:
    done = run("--draft", "mtp", checkpoint=without_head)
    assert done.exit_code == 2
    assert "no draft head" in done.stderr
