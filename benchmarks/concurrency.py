"""The concurrency curve: 1, 2, 4, 8 clients at once under each scheduler, over one set of weights.

    python benchmarks/concurrency.py --checkpoint build/random-2b-int4-head --out benchmarks/results/concurrency.json

Each client asks again as soon as it was answered. Schedulers and numbers of clients take turns, round after round, until the
rounds or the seconds are used up; of the rounds, the one of median speed is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from schedulers import SCHEDULERS, write

from kaminari_core.bench import prompt_of
from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.flow import TextPart
from kaminari_core.launch import engine_over, load_model
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_core.traffic.drive import Level, drive, report
from kaminari_core.traffic.engine_client import EngineClient


def main() -> None:
    """Measure and print; write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3vl")
    parser.add_argument("--checkpoint", default="tiny")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2, help="of each client in a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240.0, help="time budget; fewer rounds rather than longer")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ends = time.monotonic() + options.seconds
    with ExitStack() as opened:
        clients = open_clients(options, opened)
        found = measure(clients, [int(count) for count in options.clients.split(",")], options, ends)
    traffic = {name: report(levels) for name, levels in found.items()}
    for name, levels in found.items():
        for level in levels:
            print(
                f"{name:12} {level.clients:3} clients {level.tokens_per_s:8.1f} tokens/s  TTFT {level.ttft_p50 * 1000:7.0f} ms"
            )
    if options.out:
        write(options, {"traffic": traffic})


def open_clients(options: argparse.Namespace, opened: ExitStack) -> dict[str, EngineClient]:
    """A client of an engine for each scheduler, all over one model."""
    registry = load_registry()
    spec, folder = resolve(registry, options.model, options.checkpoint)
    slots = max(int(count) for count in options.clients.split(","))
    # The number of a question comes before the prompt.
    length = options.prompt_tokens + options.new_tokens + 8
    config = EngineConfig(slots=slots, max_length=length, compile=options.compile)
    model, config = load_model(registry, spec, folder, config, silent)
    clients = {}
    for name in SCHEDULERS:
        engine = engine_over(registry, spec, model, dataclasses.replace(config, scheduler=name))
        if config.compile:
            engine.warm_up(silent)
        opened.enter_context(closing(engine))
        engine.start()
        [part] = prompt_of(engine, options.prompt_tokens).messages[0].parts
        assert isinstance(part, TextPart)
        clients[name] = EngineClient(engine, part.text, options.new_tokens)
    return clients


def measure(
    clients: dict[str, EngineClient], counts: list[int], options: argparse.Namespace, ends: float
) -> dict[str, list[Level]]:
    """The levels of each scheduler. One round is always made."""
    taken: dict[str, dict[int, list[Level]]] = {name: {count: [] for count in counts} for name in clients}
    longest = 0.0
    for client in clients.values():
        client.ask(0)
    for made in range(options.rounds):
        started = time.monotonic()
        if made and started + longest > ends:
            print(f"the time is up after {made} of {options.rounds} rounds")
            break
        for count in counts:
            for name, client in clients.items():
                taken[name][count].append(drive(client, count, count * options.requests))
        longest = max(longest, time.monotonic() - started)
    return {
        name: [sorted(found, key=lambda level: level.tokens_per_s)[len(found) // 2] for found in levels.values()]
        for name, levels in taken.items()
    }


if __name__ == "__main__":
    sys.exit(main())
