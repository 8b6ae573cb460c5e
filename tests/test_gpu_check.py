"""The script that needs a card, rehearsed without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def rehearse(out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", *options, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=460)
    assert done.returncode == 0, done.stdout + done.stderr + out.read_text()
    report = json.loads(out.read_text())
    assert {step["exit"] for step in report["steps"]} == {0}
    return {step["step"]: step.get("figures") for step in report["steps"]}


def test_the_script_for_a_card_runs_through_on_a_cpu(tmp_path: Path) -> None:
    figures = rehearse(tmp_path / "report.json", "--quick")
    assert list(figures) == ["device tests", "tiny", "memory tiny"]
    [speed] = figures["tiny"]["results"]
    assert speed["tokens_per_s"] > 0
    [memory] = figures["memory tiny"]["results"]
    assert memory["worst"] < figures["memory tiny"]["limit"]


@pytest.mark.slow
def test_every_step_of_it_runs_through_on_a_small_checkpoint(tmp_path: Path) -> None:
    figures = rehearse(tmp_path / "report.json", "--tiny")
    assert [name for name in figures if name != "pack tiny"] == [
        "device tests", "tiny", "memory tiny", "tiny int4", "memory tiny int4",
    ]  # fmt: skip
    [memory] = figures["memory tiny int4"]["results"]
    assert memory["quantizer"] == "int4"
