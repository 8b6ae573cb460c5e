"""`kaminari run` with a reply that is held to a structure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kaminari_core.cli import program
from kaminari_core.registry import load_registry

Run = Callable[..., Result]
PICTURE = Path(__file__).parents[2] / "assets" / "receipt.png"
MODEL = """
from __future__ import annotations

from pydantic import BaseModel, Field


class Line(BaseModel):
    name: str = Field(max_length=5)


class Receipt(BaseModel):
    paid: bool
    lines: list[Line] = Field(min_length=1, max_length=1)


class NoSchema:
    pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program on a picture, in a folder with a Python file of a Pydantic model."""
    (tmp_path / "held_to.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    registry = load_registry(only=frozenset({"core", "qwen3vl", "glmocr"}))

    def answer(*words: str, model: str = "qwen3vl") -> Result:
        base = ["run", "--model", model, "--checkpoint", "tiny", "--no-compile", "--image", str(PICTURE)]
        return CliRunner().invoke(program(registry), [*base, *words])

    return answer


def test_a_pattern_is_streamed_and_ends_by_itself(run: Run) -> None:
    done = run("--regex", "THE [A-Z]+ SHOP", "--task", "ocr")
    assert (done.stdout, done.stderr, done.exit_code) == ("THE CORNER SHOP\n", "", 0)


def test_a_pydantic_model_in_a_file_is_a_schema(run: Run) -> None:
    done = run("--schema", "held_to.py:Receipt", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    document = json.loads(report["text"])
    assert list(document) == ["paid", "lines"]
    assert len(document["lines"][0]["name"]) <= 5
    assert (report["complete"], report["finish_reason"]) == (True, "stop")


def test_a_schema_file_and_a_cut_reply(run: Run) -> None:
    Path("schema.json").write_text('{"type": "object", "properties": {"words": {"type": "string", "minLength": 30}}}')
    done = run("--schema", "schema.json", "--max-tokens", "12")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("{")
    assert "cut after 12 tokens (--max-tokens) and has not the structure that was asked for" in done.stderr


def test_a_template_holds_where_it_is_strict(run: Run) -> None:
    words = ["--task", "extract", "--template", '{"shop": "", "lines": [{"name": ""}]}', "--max-tokens", "40"]
    held = run(*words, "--strict", model="glmocr")
    assert held.exit_code == 0, held.output
    assert re.match(r'\{\s*"shop"\s*:\s*"', held.stdout)


def test_pages_of_a_folder_are_read_within_a_structure(tmp_path: Path) -> None:
    pages, schema = (
        tmp_path / "pages",
        {"type": "object", "properties": {"paid": {"type": "boolean"}}, "required": ["paid"]},
    )
    pages.mkdir()
    for name in ("a.png", "b.png"):
        (pages / name).write_bytes(PICTURE.read_bytes())
    registry = load_registry(only=frozenset({"core", "qwen3vl"}))
    words = ["read", "--model", "qwen3vl", "--checkpoint", "tiny", "--no-compile", str(pages), "--format", "jsonl"]
    done = CliRunner().invoke(program(registry), [*words, "--schema", json.dumps(schema)])
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 2
    for record in records:
        assert isinstance(json.loads(record["text"])["paid"], bool)
        assert (record["status"], record["complete"]) == ("read", True)
        # What was forced on the model shows in its confidence, which is that of its own logits.
        assert [field["path"] for field in record["fields"]] == ["/paid"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regex", "("], "--regex cannot be enforced: invalid regex"),
        (["--regex", "a\\"], "must not end in a lone backslash"),
        (["--schema", '{"type": "money"}'], "--schema cannot be enforced: Invalid type: money"),
        (["--schema", '{"type": '], "--schema: the schema is no JSON"),
        (["--schema", "none.json"], "the schema file 'none.json' cannot be read"),
        (["--schema", "held_to.py:Nothing"], "Nothing cannot be taken from 'held_to.py': AttributeError"),
        (["--schema", "held_to.py:NoSchema"], "--schema: a JSON schema must be an object"),
        (["--schema", "no.such.module:Name"], "Name cannot be taken from 'no.such.module': ModuleNotFoundError"),
        (["--json-object", "--regex", "a"], "--regex and --json-object both say what the reply is held to"),
        (["--strict"], "--strict holds the reply to the shape of the --template; give one"),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_one_clear_line(run: Run, words: list[str], message: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
