"""Every figure of docs/performance.md that needs a quiet machine, in one run: prepare ahead, then measure when nothing else runs.

    python benchmarks/quiet_window.py --prepare
    python benchmarks/quiet_window.py --seconds 2700

Preparing writes the checkpoints with random weights, their packed forms and the GGUF files into build/; what is there is kept.
Measuring runs the steps in order, each within a budget of its own, starts none that would not end in time, and goes on
after one that fails. At the end the document is written anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
KAMINARI = str(Path(sys.executable).with_name("kaminari"))
BUILD, RESULTS = "build", "benchmarks/results"
SIZES = {"2b": "qwen3vl", "glmocr": "glmocr"}
"""The sizes of scripts/make_random_checkpoint.py that are measured, and the models that serve them."""


@dataclass(frozen=True)
class Step:
    """One program: what it makes, how it is called, and the seconds that it may take."""

    name: str
    command: list[str]
    seconds: int
    makes: str = ""


def preparations(llamacpp: str) -> list[Step]:
    """Everything that can be made ahead."""
    python = sys.executable
    steps = []
    for size, model in SIZES.items():
        folder = f"{BUILD}/random-{size}"
        script = [python, "scripts/make_random_checkpoint.py", "--size", size, "--out", folder]
        steps.append(Step(f"checkpoint {size}", script, 600, folder))
        for form, head in (("int4", "none"), ("int4-head", "int4")):
            out = f"{folder}-{form}"
            pack = [KAMINARI, "quantize", "--model", model, "--checkpoint", folder, "--quantizer", "int4"]
            steps.append(Step(f"{form} {size}", [*pack, "--scale", "rtn", "--head", head, "--out", out], 900, out))
    if Path(ROOT / llamacpp).exists():
        for kind in ("Q4_0", "BF16"):
            out = f"{BUILD}/random-2b-{kind.lower()}.gguf"
            make = [
                python,
                "benchmarks/make_gguf.py",
                "--checkpoint",
                f"{BUILD}/random-2b",
                "--type",
                kind,
                "--out",
                out,
            ]
            steps.append(Step(f"GGUF {kind}", make, 600, out))
    return steps


def measurements(llamacpp: str) -> list[Step]:
    """What is measured, the most important first."""
    python = sys.executable
    steps = [ladder(size, seconds) for size, seconds in (("2b", 1000),)]
    head = f"{BUILD}/random-2b-int4-head"
    beside = [python, "benchmarks/llamacpp.py", "--python", llamacpp, "--checkpoint", f"{BUILD}/random-2b"]
    beside += ["--packed", head, "--q4", f"{BUILD}/random-2b-q4_0.gguf", "--bf16", f"{BUILD}/random-2b-bf16.gguf"]
    steps.append(Step("llama.cpp", [*beside, "--seconds", "360", "--out", f"{RESULTS}/llamacpp.json"], 480))
    buckets = [python, "benchmarks/length_buckets.py", "--checkpoint", head, "--live", "480", "--caches", "512,4096"]
    steps.append(Step("length buckets", [*buckets, "--out", f"{RESULTS}/length_buckets.json"], 180))
    curve = [python, "benchmarks/concurrency.py", "--checkpoint", head, "--seconds", "200"]
    steps.append(Step("concurrency", [*curve, "--out", f"{RESULTS}/concurrency.json"], 300))
    held = [python, "benchmarks/structured.py", "--checkpoint", head, "--tokens", "24", "--rounds", "5"]
    steps.append(Step("structured", [*held, "--out", f"{RESULTS}/structured.json"], 300))
    steps.append(ladder("glmocr", 360))
    compiling = [KAMINARI, "compile", "--model", "qwen3vl", "--checkpoint", head, "--report", "--clear", "--slots", "1"]
    compiling += ["--max-length", "512", "--out", f"{RESULTS}/compile_2b.json"]
    steps.append(Step("compile", compiling, 400))
    return steps


def ladder(size: str, seconds: int) -> Step:
    """The ladder on the shapes of one size."""
    folder = f"{BUILD}/random-{size}"
    command = [KAMINARI, "bench", "--ladder", "--model", SIZES[size], "--checkpoint", folder]
    for form in ("int4", "int4-head"):
        command += ["--packed", f"{form}={folder}-{form}"]
    out = f"{RESULTS}/ladder_{size}.json"
    return Step(f"ladder {size}", [*command, "--seconds", str(seconds), "--out", out], seconds + 240)


def run(step: Step, left: float) -> bool:
    """Run one step for as long as it may; says how it went."""
    started = time.monotonic()
    print(
        f"{step.name}: {' '.join(Path(part).name if Path(part).is_absolute() else part for part in step.command)}",
        flush=True,
    )
    try:
        code = subprocess.run(step.command, cwd=ROOT, timeout=min(step.seconds, left), check=False).returncode
        how = f"exit {code}"
    except subprocess.TimeoutExpired:
        code, how = 1, "out of time"
    print(f"{step.name}: {how}, {time.monotonic() - started:.0f} s", flush=True)
    return code == 0


def main() -> int:
    """Prepare or measure; the exit code is 0 when every step ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="make what is not there yet, and measure nothing")
    parser.add_argument("--seconds", type=float, default=2700.0, help="time budget of all steps")
    parser.add_argument("--only", help="names of steps, with commas between them")
    parser.add_argument(
        "--python", default=f"{BUILD}/llamacpp/venv/bin/python", help="an interpreter that has llama-cpp-python"
    )
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    steps = preparations(options.python) if options.prepare else measurements(options.python)
    wanted = None if options.only is None else {name.strip() for name in options.only.split(",")}
    well = True
    for step in steps:
        if (wanted is not None and step.name not in wanted) or (step.makes and (ROOT / step.makes).exists()):
            continue
        left = ends - time.monotonic()
        if left < step.seconds / 2:
            print(f"{step.name}: not started, {left:.0f} s are left")
            well = False
            continue
        well &= run(step, left)
    if not options.prepare:
        subprocess.run([sys.executable, "scripts/make_performance_docs.py"], cwd=ROOT, check=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
