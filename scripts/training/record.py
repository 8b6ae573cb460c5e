"""What is kept of a run: its curve, thinned, with the machine, the versions and the final error rates."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

POINTS = 60
PACKAGES = ("torch", "transformers", "numpy", "pillow", "safetensors")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read `log.jsonl`; the clock, which starts anew at every continuation, is made one clock of training minutes."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    before = last = 0.0
    for record in records:
        if record["seconds"] < last:
            before += last
        last = record["seconds"]
        record["minutes"] = round((before + last) / 60, 2)
    return records


def curve(records: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Average the records over equal stretches: minutes, characters read, losses and shares named right while training."""
    size = max(1, len(records) // POINTS)
    points = []
    for start in range(0, len(records), size):
        stretch = records[start : start + size]
        point = {
            "step": stretch[-1]["step"],
            "minutes": stretch[-1]["minutes"],
            "characters": stretch[-1]["characters"],
        }
        for name in ("patch_right", "block_right", "answer", "answer_right", "guide", "draft", "draft_right", "rate"):
            values = [record[name] for record in stretch if name in record]
            if values:
                point[name] = round(fmean(values), 4)
        points.append(point)
    return points


def describe(command: str, log: Path, evaluation: dict[str, object]) -> dict[str, object]:
    """Give the contents of `benchmarks/results/train_tiny.json`."""
    records = read_log(log)
    processor = [line.split(":")[1].strip() for line in _processor_lines() if line.startswith("model name")]
    return {
        "command": command,
        "machine": {"processor": processor[0] if processor else platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "minutes": records[-1]["minutes"],
        "steps": records[-1]["step"],
        "characters": records[-1]["characters"],
        "evaluation": evaluation,
        "curve": curve(records),
    }


def _processor_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
