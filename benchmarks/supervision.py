"""What a process of its own costs: tokens per second of the same engine in this process and in a child, in one run.

    python benchmarks/supervision.py --model qwen3vl --checkpoint tiny --rows 4

Both are open at once and take turns, round after round; medians are compared. Each round decodes `--rows` requests together, past
end tokens. The larger the model, the smaller the share of what is the same for all: one message per step. Where other work takes
turns on the same cores, wall-clock time is mostly that; processor time of the process that decodes is compared as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from kaminari_core.bench import machine_facts, versions
from kaminari_core.config import EngineConfig
from kaminari_core.flow import Event, Failed, Finished, Message, Request, Result, TextPart
from kaminari_core.launch import open_engine, open_supervised
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_core.serving import Serving
from kaminari_core.supervise.engine import SupervisedEngine


def decode(engine: Serving, rows: int, tokens: int) -> float:
    """Tokens per second over all rows from the first token to the end of the last."""
    ends: list[Result] = []
    failures: list[Exception] = []
    done = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Failed):
            failures.append(event.error)
        elif isinstance(event, Finished):
            ends.append(event.result)
        if len(ends) + len(failures) == rows:
            done.set()

    text = TextPart("The quick brown fox jumps over the lazy dog. ")
    began = time.monotonic()
    for _ in range(rows):
        engine.submit(Request((Message("user", (text,)),), max_tokens=tokens, ignore_end=True), sink)
    done.wait()
    if failures:
        raise failures[0]
    # As the caller sees it, so that what lies between the step and the caller counts.
    seconds = time.monotonic() - began - min(result.timings.ttft for result in ends)
    return rows * tokens / seconds


def processor_seconds(pid: int | None) -> float:
    """What the threads of a process have spent on a processor (Linux counts it in nanoseconds)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def measure(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second and processor seconds per step of every round, by contender."""
    config = EngineConfig(
        device=options.device,
        dtype=options.dtype,
        compile=options.compile,
        slots=options.rows,
        max_length=512,
        max_tokens=options.tokens,
    )
    registry = load_registry()
    contenders: dict[str, Callable[..., Serving]] = {"in process": open_engine, "supervised": open_supervised}
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    with ExitStack() as opened:
        engines = {
            name: opened.enter_context(closing(opening(registry, options.model, options.checkpoint, config, silent)))
            for name, opening in contenders.items()
        }
        for counted in [False, *[True] * options.rounds]:
            for name, engine in engines.items():
                pid = engine.process_id if isinstance(engine, SupervisedEngine) else os.getpid()
                before = processor_seconds(pid)
                speed = decode(engine, options.rows, options.tokens)
                if counted:
                    speeds[name].append(speed)
                    spent[name].append((processor_seconds(pid) - before) / options.tokens)
    return speeds, spent


def summary(
    options: argparse.Namespace, speeds: dict[str, list[float]], spent: dict[str, list[float]]
) -> dict[str, object]:
    """What is printed and kept: medians, and the ratios of neighbours in time, on which other work weighs alike."""
    medians = {name: statistics.median(taken) for name, taken in speeds.items()}
    rounds = [ours / plain for plain, ours in zip(*speeds.values(), strict=True)]
    processor = [plain / ours for plain, ours in zip(*spent.values(), strict=True)]
    settings = ("model", "checkpoint", "rows", "tokens", "rounds", "compile")
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_facts(torch.device("cpu")),
        "versions": versions(),
        "settings": {name: getattr(options, name) for name in settings},
        "tokens_per_s": {name: round(median, 1) for name, median in medians.items()},
        "step_ms": round(1000 * options.rows / medians["in process"], 3),
        "processor_ms_per_step": {name: round(1000 * statistics.median(taken), 3) for name, taken in spent.items()},
        "processor_ratio": round(statistics.median(processor), 4),
        "processor_ratio_of_rounds": [round(ratio, 4) for ratio in processor],
        "ratio": round(statistics.median(rounds), 4),
        "ratio_of_rounds": [round(ratio, 4) for ratio in rounds],
    }


def main() -> None:
    """Measure and print; write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3vl")
    parser.add_argument("--checkpoint", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens of each request")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="compile the decode step of both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = summary(options, *measure(options))
    for name in ("tokens_per_s", "step_ms", "ratio", "ratio_of_rounds", "processor_ratio"):
        print(f"{name:16} {found[name]}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
