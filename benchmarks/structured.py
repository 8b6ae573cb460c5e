"""What does it cost to hold replies to a JSON schema? Decode with and without, in one run.

    python benchmarks/structured.py --checkpoint DIR [--rows 1,4] [--tokens 48] [--rounds 7] [--out FILE]

The contenders take turns in every round: the same prompts decoded freely and past their end tokens, and held to a schema whose
documents are longer than that. `scripts/make_random_checkpoint.py` writes checkpoints of true shapes with random weights; their
tokenizer is small, so grammars get a vocabulary of the model's full size here, bytes and made-up words, the same in every run.
Beside the ratio, the parts of a mask are timed alone: what the grammar takes for one, and what the device takes to apply it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kaminari_core.bench import machine_facts, versions
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.flow import Event, Failed, Finished, Message, Request, Result, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_core.structured.grammars import Grammars
from kaminari_core.structured.masks import Masks
from kaminari_core.structured.structure import Structure
from kaminari_core.text import ByteDetokenizer

LIMIT = 1.15
"""The most that a held token may take, relative to a free one."""
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 60},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
        "price": {"type": "number", "minimum": 0, "maximum": 100000},
        "date": {"type": "string", "format": "date"},
        "kind": {"enum": ["food", "household", "other"]},
    },
    "required": ["name", "quantity", "price", "date", "kind"],
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shop": {"type": "string", "minLength": 8},
        "items": {"type": "array", "items": ITEM, "minItems": 200},
    },
    "required": ["shop", "items"],
}


@dataclass(frozen=True, slots=True)
class Compared:
    """Milliseconds per decode step of one number of rows, medians over the rounds, and their ratio."""

    rows: int
    free: float
    held: float
    ratio: float
    ratios: tuple[float, ...]


def made_up_vocabulary(size: int) -> dict[int, bytes]:
    """All bytes and, up to `size` tokens, words of syllables, runs of marks, blanks and CJK characters, in the shares of a
    byte-level BPE vocabulary."""
    draw = random.Random(0)
    syllables = [
        draw.choice("bcdfghklmnprstvw") + draw.choice("aeiou") + draw.choice(["", "n", "s", "r"]) for _ in range(300)
    ]
    marks = "\"{}[],:;() \n\t-_/'.=<>"
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(tokens) < size:
        kind = draw.random()
        if kind < 0.15:
            text = "".join(draw.choices(marks, k=draw.randint(2, 4)))
        elif kind < 0.2:
            text = " " * draw.randint(2, 80)
        elif kind < 0.3:
            text = "".join(chr(draw.randint(0x4E00, 0x9FFF)) for _ in range(draw.randint(1, 3)))
        else:
            text = draw.choice(["", " "]) + "".join(draw.choices(syllables, k=draw.randint(1, 4)))
        tokens[text.encode()] = None
    return dict(enumerate(tokens))


def serve(engine: Engine, requests: Sequence[Request]) -> float:
    """Milliseconds per decode step of requests that are decoded together."""
    results: list[Result | Failed] = []
    done = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            results.append(event.result if isinstance(event, Finished) else event)
            if len(results) == len(requests):
                done.set()

    for request in requests:
        engine.submit(request, sink)
    done.wait()
    times = []
    for result in results:
        if isinstance(result, Failed):
            raise result.error
        times.append(1000 * result.timings.decode / (result.usage.completion_tokens - 1))
    return statistics.median(times)


def compare(engine: Engine, rows: int, tokens: int, rounds: int) -> Compared:
    """Take turns, and leave the first one of each out."""
    asked = [Request((Message("user", (TextPart(f"Read page {row}."),)),), max_tokens=tokens) for row in range(rows)]
    structure = Structure.json_schema(SCHEMA)
    contenders = {
        "free": [replace(request, ignore_end=True) for request in asked],
        "held": [replace(request, structure=structure) for request in asked],
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for counted in [False, *[True] * rounds]:
        for name, requests in contenders.items():
            fresh = [replace(request, id=f"{name} {index}") for index, request in enumerate(requests)]
            milliseconds = serve(engine, fresh)
            if counted:
                taken[name].append(milliseconds)
    free, held = statistics.median(taken["free"]), statistics.median(taken["held"])
    ratios = tuple(round(each / other, 4) for each, other in zip(taken["held"], taken["free"], strict=True))
    return Compared(rows, round(free, 3), round(held, 3), round(statistics.median(ratios), 4), ratios)


def time_parts(engine: Engine, steps: int = 200) -> dict[str, float]:
    """Microseconds of what one mask takes, medians over a random document, and milliseconds of the first preparations."""
    began = time.perf_counter()
    grammars = Grammars(engine.model)
    constraint = grammars.constraint(Structure.json_schema(SCHEMA))
    first = time.perf_counter() - began
    began = time.perf_counter()
    grammars.constraint(Structure.json_schema({**SCHEMA, "title": "another"}))
    compiled = time.perf_counter() - began
    vocabulary, device = engine.shape.vocabulary, engine.model.device
    masks = Masks(1, vocabulary, device)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)).to(device, engine.model.dtype)
    draw = random.Random(0)
    parts: dict[str, list[float]] = {"grammar": [], "copy and unpack": [], "apply and choose": [], "accept": []}
    for _ in range(steps):
        # Other words each time, so that the document is not one state.
        wanted = logits.roll(draw.randrange(vocabulary))
        times = [time.perf_counter()]
        masks.write(constraint, (), 0)
        times.append(time.perf_counter())
        forbidden = masks.forbidden(1)
        times.append(time.perf_counter())
        token = int(wanted.masked_fill(forbidden[0], -torch.inf).argmax())
        times.append(time.perf_counter())
        constraint.accept(token)
        times.append(time.perf_counter())
        for part, start, stop in zip(parts.values(), times, times[1:], strict=False):
            part.append(1e6 * (stop - start))
    medians = {f"{name} (us)": round(statistics.median(part), 1) for name, part in parts.items()}
    worst = {"slowest grammar (us)": round(max(parts["grammar"]), 1)}
    return (
        medians | worst | {"first request (ms)": round(first * 1000), "another schema (ms)": round(compiled * 1000, 1)}
    )


def main() -> None:
    """Measure and print; write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3vl")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--rows", default="1,4", help="how many requests are decoded together")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each reply")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [int(each) for each in options.rows.split(",")]
    config = EngineConfig(slots=max(rows), max_length=512, compile=not options.no_compile)
    engine = open_engine(load_registry(), options.model, str(options.checkpoint), config, silent)
    table = made_up_vocabulary(engine.shape.vocabulary - 300)
    for token in engine.shape.end_tokens:
        table.pop(token, None)
    engine.model.detokenizer = lambda: ByteDetokenizer(table)  # type: ignore[method-assign]
    with closing(engine):
        compared = [compare(engine, each, options.tokens, options.rounds) for each in rows]
        parts = time_parts(engine)
    for each in compared:
        print(
            f"{each.rows} rows: free {each.free:8.2f} ms, held {each.held:8.2f} ms, {each.ratio:.3f} x (limit {LIMIT})"
        )
    print("  ".join(f"{name} {value:g}" for name, value in parts.items()))
    if options.out:
        shape = engine.shape
        report = {
            "command": " ".join(["python", *sys.argv]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine_facts(engine.model.device),
            "versions": versions(),
            "settings": {"tokens": options.tokens, "rounds": options.rounds, "dtype": str(engine.model.dtype)},
            "shape": {"layers": shape.layers, "hidden": shape.hidden, "vocabulary": shape.vocabulary},
            "limit": LIMIT,
            "rows": {
                each.rows: {"free_ms": each.free, "held_ms": each.held, "ratio": each.ratio, "ratios": each.ratios}
                for each in compared
            },
            "parts": parts,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
