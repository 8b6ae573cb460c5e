"""The script that needs a card, rehearsed without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_script_for_a_card_runs_through_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert [(step["step"], step["exit"]) for step in report["steps"]] == [("device tests", 0), ("tiny", 0)]
    [figures] = report["steps"][1]["figures"]["results"]
    assert figures["tokens_per_s"] > 0
