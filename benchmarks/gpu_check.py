"""Everything that needs a card, in one run of at most eight minutes: `make gpu-check`.

Runs the device tests on the card (captured steps, no waiting inside a step, quantized products, pinned pictures), then measures
on the bundled checkpoint and on one with the 2B shapes and random weights: speed against the stock implementation, in bfloat16
and with int4 layers, and the memory plan against what the allocator and the driver say. Writes one JSON. Each step has what is
left of the time budget; one that fails or runs out is reported as such and the others go on. `--device cpu --quick` runs the same
path without a card, as a rehearsal, and `--tiny` all of its steps on the bundled checkpoint.
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
BUILD = ROOT / "build"
KAMINARI = str(Path(sys.executable).with_name("kaminari"))
SHORT = ["--new-tokens", "8", "--rounds", "1", "--max-length", "512", "--no-compile"]


def main() -> int:
    """Run all steps; the exit code is 0 when each ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="the bundled checkpoint only, a few tokens")
    parser.add_argument("--tiny", action="store_true", help="every step, on the bundled checkpoint, a few tokens")
    parser.add_argument("--seconds", type=float, default=470.0, help="time budget")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    options = parser.parse_args()
    BUILD.mkdir(exist_ok=True)
    check = Check(options.device, time.monotonic() + options.seconds, small=options.quick or options.tiny)
    check.device_tests()
    check.bench("tiny", "tiny", [])
    check.memory("tiny", "tiny")
    if not options.quick:
        source = "tiny" if options.tiny else check.random_2b()
        name = "tiny" if options.tiny else "2b"
        packed = check.packed(name, source)
        if not options.tiny:
            check.bench(name, source, ["--against", "hf"])
        check.bench(f"{name} int4", packed, [])
        if not options.tiny:
            check.memory(name, source)
        check.memory(f"{name} int4", packed)
    options.out.write_text(json.dumps({"device": options.device, "steps": check.steps}, indent=1) + "\n")
    return 0 if all(step["exit"] == 0 for step in check.steps) else 1


class Check:
    """The steps that have run, and how the next are run. `small` keeps them to a few tokens and compiles nothing."""

    def __init__(self, device: str, deadline: float, *, small: bool) -> None:
        self.steps: list[dict[str, Any]] = []
        self._device, self._deadline, self._small = device, deadline, small

    def device_tests(self) -> None:
        """The tests that hold on every device."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/device"]
        command += ["-m", "not slow" if self._small else ""]
        self._run("device tests", command, KAMINARI_TEST_DEVICE=self._device)

    def bench(self, name: str, checkpoint: str, options: list[str]) -> None:
        """Speed of one checkpoint."""
        command = [KAMINARI, "bench", "--model", "qwen3vl", "--checkpoint", checkpoint, "--device", self._device]
        self._measure(name, [*command, *(SHORT if self._small else ["--rows", "1,2,4"]), *options])

    def memory(self, name: str, checkpoint: str) -> None:
        """The memory plan of one checkpoint against what is measured."""
        script = str(ROOT / "benchmarks" / "memory_plan.py")
        command = [sys.executable, script, "--model", "qwen3vl", "--checkpoint", checkpoint, "--device", self._device]
        command += ["--max-length", "512", "--visual-tokens", "128"] if self._small else ["--compile"]
        self._measure(f"memory {name}", command)

    def random_2b(self) -> str:
        """A checkpoint with the 2B shapes; made if it is not there."""
        folder = BUILD / "random-2b"
        if not (folder / "config.json").exists():
            script = str(ROOT / "scripts" / "make_random_checkpoint.py")
            self._run("write random 2B", [sys.executable, script, "--size", "2b", "--out", str(folder)])
        return str(folder)

    def packed(self, name: str, source: str) -> str:
        """Its int4 form; made if it is not there."""
        folder = BUILD / f"gpu_check_{name}_int4"
        if not folder.exists():
            command = [KAMINARI, "quantize", "--model", "qwen3vl", "--checkpoint", source, "--quantizer", "int4"]
            self._run(f"pack {name}", [*command, "--scale", "rtn", "--out", str(folder)])
        return str(folder)

    def _measure(self, name: str, command: list[str]) -> None:
        """Run a program that writes figures with `--out`, and attach them."""
        out = BUILD / f"gpu_check_{name.replace(' ', '_')}.json"
        out.unlink(missing_ok=True)
        step = self._run(name, [*command, "--out", str(out)])
        step["figures"] = json.loads(out.read_text()) if out.exists() else None

    def _run(self, name: str, command: list[str], **environment: str) -> dict[str, Any]:
        """Run one step: its command, exit code (None when the time ran out), seconds and the end of its output."""
        started = time.monotonic()
        left = max(1.0, self._deadline - started)
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
        step = {
            "step": name,
            "command": " ".join(shown),
            "exit": code,
            "seconds": round(time.monotonic() - started, 1),
            "output": output[-2000:],
        }
        self.steps.append(step)
        return step


if __name__ == "__main__":
    sys.exit(main())
