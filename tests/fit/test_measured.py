"""Plans of the published shapes against the peak of a process that serves all that was planned for. Minutes, and gigabytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.make_random_checkpoint import make_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "size"), [("qwen3vl", "2b"), ("glmocr", "glmocr")])
def test_published_shapes_within_a_tenth(tmp_path: Path, model: str, size: str) -> None:
    folder, out = make_checkpoint(tmp_path / size, size), tmp_path / "report.json"
    command = [
        sys.executable,
        "benchmarks/memory_plan.py",
        "--model",
        model,
        "--checkpoint",
        str(folder),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = json.loads(out.read_text())["results"]
    assert result["weights"] > 2e9
    assert result["worst"] < 0.1


def test_the_committed_figures_are_within_a_tenth() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "memory_plan.json").read_text())
    assert {(result["model"], result["checkpoint"]) for result in report["results"]} == {
        ("qwen3vl", "random-2b"), ("qwen3vl", "random-2b-int4"),
        ("glmocr", "random-glmocr"), ("qwen3vl", "tiny"), ("glmocr", "tiny"),
    }  # fmt: skip
    for result in report["results"]:
        assert abs(result["resident"]["off"]) < report["limit"]
        assert abs(result["tensors"]["off"]) < report["limit"]
