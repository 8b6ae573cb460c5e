"""Evidence on the command line: `kaminari run --json` with confidence and boxes, loops and calibrations."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kaminari_core.cli import program
from kaminari_core.evidence.calibration import Calibration
from kaminari_core.registry import load_registry
from tests.evidence.looping_plugin import LOOP

Run = Callable[..., Result]
CALIBRATION = Calibration(measure="minimum", temperature=4.0, samples=9, error_before=0.4, error_after=0.1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `kaminari run` with the model of the plugin, on a checkpoint in tmp_path."""
    points = {"core": "kaminari_core.builtin", "looping": "tests.evidence.looping_plugin"}
    registry = load_registry(EntryPoint(name, target, "kaminari") for name, target in points.items())
    (tmp_path / "config.json").write_text('{"model_type": "looping"}')
    start = ["run", "--model", "looping", "--checkpoint", str(tmp_path), "--no-compile", "--max-length", "1024"]
    return lambda *arguments: CliRunner().invoke(program(registry), [*start, *map(str, arguments)])


def reply(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_loop_is_trimmed_and_said_on_stderr(run: Run) -> None:
    done = run("--task", "ocr")
    assert (done.stdout, done.exit_code) == ("Prices: a1\n", 0)
    assert done.stderr == (
        "note: the reply said the same 3 tokens 85 times and was ended (--no-loop-guard lets it go on)\n"
    )
    found = reply(run("--task", "ocr", "--json"))
    assert (found["text"], found["finish_reason"], found["finish_detail"]) == ("Prices: a1", "stop", "loop")
    assert found["repeat"] == {"period": 3, "copies": 85, "kept": 10}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("--task", "ocr", "--no-loop-guard"), LOOP), (("--task", "caption"), f"Many {LOOP}"), ((f"Say {LOOP}",), f"Say {LOOP}")],
    ids=["off", "another task", "a prompt"],
)  # fmt: skip
def test_what_is_not_guarded_goes_on(run: Run, arguments: tuple[str, ...], text: str) -> None:
    done = run(*arguments)
    assert (done.stdout, done.stderr) == (f"{text}\n", "")


def test_confidence_and_boxes_are_parts_of_the_json_object(run: Run, tmp_path: Path) -> None:
    text = '{"bbox_2d": [1, 2, 3, 4], "label": "a"}'
    plain = reply(run("--json", text))
    assert {"confidence", "boxes", "repeat"} & plain.keys() == set()
    found = reply(run("--json", "--confidence", "--boxes", text))
    assert found["boxes"] == [{"label": "a", "model": [1, 2, 3, 4], "file": None, "picture": None}]
    assert [line["text"] for line in found["confidence"]["lines"]] == [text]
    assert [field["path"] for field in found["confidence"]["fields"]][-1] == "/label"
    refused = run("--confidence", "x")
    assert (refused.exit_code, "give --json as well" in refused.stderr) == (2, True)


def test_the_checkpoints_calibration_is_used_and_another_can_be_named(run: Run, tmp_path: Path) -> None:
    def calibrated(*arguments: object) -> tuple[float, float]:
        (line,) = reply(run("--json", "--confidence", *arguments, "x"))["confidence"]["lines"]
        return line["minimum"], line["calibrated"]

    assert calibrated()[1] is None
    CALIBRATION.write(tmp_path / "calibration.json")
    minimum, own = calibrated()
    assert own == CALIBRATION.apply(minimum) != minimum
    assert calibrated("--calibration", "none")[1] is None
    file = tmp_path / "other.json"
    file.write_text((tmp_path / "calibration.json").read_text().replace("4.0", "0.5"))
    assert calibrated("--calibration", file)[1] == pytest.approx(Calibration.read(file).apply(minimum))
    missing = run("--calibration", tmp_path / "nothing.json", "x")
    assert (missing.exit_code, "nothing.json" in missing.stderr) == (2, True)
