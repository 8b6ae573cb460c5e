"""Everything that needs a card, in one run of at most eight minutes: `make gpu-check`.

Runs the device tests on the card, then measures the bundled checkpoint and one with the 2B shapes and random weights against
the stock implementation, and writes one JSON. Each step has what is left of the time budget; one that fails or runs out is
reported as such and the others go on. `--device cpu --quick` runs the same path without a card, as a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, command: list[str], deadline: float, **environment: str) -> dict[str, Any]:
    """Run one step; returns its command, exit code (None when the time ran out), seconds and the end of its output."""
    started = time.monotonic()
    left = max(1.0, deadline - started)
    code: int | None
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=left
        )
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        # Bytes, whatever was asked for: the text is decoded only when a program has ended.
        code, output = None, bytes(error.stdout or b"").decode("utf-8", "replace")
    shown = [Path(part).name if Path(part).is_absolute() else part for part in command]
    print(f"{name}: {'out of time' if code is None else f'exit {code}'}", flush=True)
    return {
        "step": name,
        "command": " ".join(shown),
        "exit": code,
        "seconds": round(time.monotonic() - started, 1),
        "output": output[-2000:],
    }


def bench(name: str, checkpoint: str, device: str, options: list[str], deadline: float) -> dict[str, Any]:
    """Run one `kaminari bench` and attach the figures it wrote."""
    out = ROOT / "build" / f"gpu_check_{name}.json"
    out.unlink(missing_ok=True)
    kaminari = str(Path(sys.executable).with_name("kaminari"))
    step = run(
        name,
        [
            kaminari,
            "bench",
            "--model",
            "qwen3vl",
            "--checkpoint",
            checkpoint,
            "--device",
            device,
            "--out",
            str(out),
            *options,
        ],
        deadline,
    )
    return {**step, "figures": json.loads(out.read_text()) if out.exists() else None}


def main() -> int:
    """Run all steps; the exit code is 0 when each ended well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="the bundled checkpoint only, a few tokens")
    parser.add_argument("--seconds", type=float, default=470.0, help="time budget")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    (ROOT / "build").mkdir(exist_ok=True)
    python = sys.executable
    steps = [
        run(
            "device tests",
            [
                python,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "tests/device",
                "-m",
                "" if not options.quick else "not slow",
            ],
            deadline,
            KAMINARI_TEST_DEVICE=options.device,
        )
    ]
    size = (
        ["--new-tokens", "8", "--rounds", "1", "--max-length", "512", "--no-compile"]
        if options.quick
        else ["--rows", "1,2,4"]
    )
    steps.append(bench("tiny", "tiny", options.device, size, deadline))
    if not options.quick:
        folder = ROOT / "build" / "random-2b"
        if not folder.exists():
            script = str(ROOT / "scripts" / "make_random_checkpoint.py")
            steps.append(run("write random 2B", [python, script, "--size", "2b", "--out", str(folder)], deadline))
        steps.append(bench("2b", str(folder), options.device, ["--rows", "1,2,4", "--against", "hf"], deadline))
    options.out.write_text(json.dumps({"device": options.device, "steps": steps}, indent=1) + "\n")
    return 0 if all(step["exit"] == 0 for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
