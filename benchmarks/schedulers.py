"""What schedulers and chunked prefill do to latency and throughput, as ratios within one run.

    python benchmarks/schedulers.py --model qwen3vl --checkpoint tiny

Gap: a request streams while a prompt of `--prompt` tokens is admitted, with chunks and without; the time between its tokens is
what a reader sees. Throughput: a burst of `--burst` requests at once, and the same number arriving at random (exponential gaps,
at `--load` of the rate that the burst reached), under each scheduler. Contenders take turns, round after round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from kaminari_core.bench import measured_where
from kaminari_core.config import EngineConfig
from kaminari_core.errors import PromptTooLongError
from kaminari_core.flow import Delta, Event, Failed, Finished, Message, Request, Result, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_core.serving import Serving

SCHEDULERS = ("continuous", "microbatch", "streaming")
FILLER = "The quick brown fox jumps over the lazy dog. "


class Watched:
    """A request that was submitted, with the times of its tokens."""

    def __init__(self, engine: Serving, request: Request) -> None:
        self.times: list[float] = []
        self.end: Result | Exception | None = None
        self.done = threading.Event()
        self.submitted = time.monotonic()
        engine.submit(request, self._sink)

    def _sink(self, event: Event) -> None:
        match event:
            case Delta():
                self.times.append(time.monotonic())
            case Finished(result=result):
                self.end = result
            case Failed(error=error):
                self.end = error
        if not isinstance(event, Delta):
            self.done.set()

    def result(self) -> Result:
        """Wait for the end. Raises the error of one that failed."""
        self.done.wait()
        if isinstance(self.end, Exception):
            raise self.end
        assert self.end is not None
        return self.end


def ask(text: str, tokens: int) -> Request:
    """A request that decodes a known number of tokens."""
    return Request((Message("user", (TextPart(text),)),), max_tokens=tokens, ignore_end=True)


def prompt_of(engine: Serving, tokens: int) -> str:
    """Filler that makes a prompt of as nearly so many tokens as can be, never more."""
    few, many = 1, tokens * 8
    while many - few > 1:
        middle = (few + many) // 2
        try:
            fits = engine.preview(ask(filler(middle), 1)).length <= tokens
        except PromptTooLongError:
            fits = False
        few, many = (middle, many) if fits else (few, middle)
    return filler(few)


def filler(characters: int) -> str:
    """Text of a given length."""
    return (FILLER * (characters // len(FILLER) + 1))[:characters]


def gaps(engine: Serving, prompt: str) -> dict[str, float]:
    """Gaps in ms between the tokens of a stream from when a long prompt is submitted to its first token, and that time."""
    request = ask("go on", engine.config.max_length)
    stream = Watched(engine, request)
    while len(stream.times) < 20:
        time.sleep(0.001)
    admitted = Watched(engine, ask(prompt, 1))
    admitted.result()
    while stream.times[-1] <= admitted.times[-1]:
        time.sleep(0.001)
    engine.cancel(request.id)
    stream.done.wait()
    # From the last token before the prompt came to the first after it was in.
    first = sum(at < admitted.submitted for at in stream.times) - 1
    last = sum(at < admitted.times[0] for at in stream.times) + 1
    times = stream.times[first:last]
    between = sorted(1000 * (later - earlier) for earlier, later in itertools.pairwise(times))
    return {
        "p50": statistics.median(between),
        "p99": between[min(len(between) - 1, int(0.99 * len(between)))],
        "max": between[-1],
        "ttft": 1000 * (admitted.times[0] - admitted.submitted),
    }


def serve_all(engine: Serving, requests: Sequence[Request], arrivals: Sequence[float]) -> dict[str, float]:
    """Submit requests at their times; tokens per second from the first arrival to the last end, and the median latency in ms."""
    began = time.monotonic()
    watched = []
    for request, at in zip(requests, arrivals, strict=True):
        time.sleep(max(0.0, began + at - time.monotonic()))
        watched.append(Watched(engine, request))
    results = [one.result() for one in watched]
    tokens = sum(result.usage.completion_tokens for result in results)
    return {
        "tokens_per_s": tokens / (time.monotonic() - began),
        "latency": 1000 * statistics.median(result.timings.total for result in results),
        "inter_token": 1000
        * statistics.median(result.timings.decode / (result.usage.completion_tokens - 1) for result in results),
    }


def measure_gaps(options: argparse.Namespace, engines: dict[str, Serving]) -> dict[str, dict[str, float]]:
    """The gaps of each engine, medians over the rounds."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for counted in [False, *[True] * options.rounds]:
        for name, engine in engines.items():
            found = gaps(engine, prompt_of(engine, options.prompt))
            if counted:
                taken[name].append(found)
    return {name: medians(found) for name, found in taken.items()}


def measure_throughput(options: argparse.Namespace, engines: dict[str, Serving]) -> dict[str, dict[str, float]]:
    """Burst and random arrivals under each scheduler, medians over the rounds."""
    taken: dict[str, list[dict[str, float]]] = {
        f"{name}, {kind}": [] for kind in ("burst", "random") for name in engines
    }
    chance = random.Random(1)
    lengths = [chance.randint(options.tokens // 2, options.tokens * 3 // 2) for _ in range(options.burst)]
    rate = 0.0
    for counted in [False, *[True] * options.rounds]:
        for kind in ("burst", "random"):
            apart = (
                [chance.expovariate(options.load * rate) for _ in lengths] if kind == "random" else [0.0] * len(lengths)
            )
            arrivals = [sum(apart[: index + 1]) for index in range(len(apart))]
            for name, engine in engines.items():
                requests = [ask(f"question {index}", length) for index, length in enumerate(lengths)]
                found = serve_all(engine, requests, arrivals)
                if name == "continuous" and kind == "burst":
                    rate = found["tokens_per_s"] / statistics.mean(lengths)
                if counted:
                    taken[f"{name}, {kind}"].append(found)
    return {name: medians(found) for name, found in taken.items()}


def medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}


@contextmanager
def opened(options: argparse.Namespace, variants: dict[str, dict[str, Any]]) -> Iterator[dict[str, Serving]]:
    """An engine for each variant of the settings."""
    registry = load_registry()
    settings: dict[str, Any] = {"device": options.device, "compile": options.compile, "slots": options.slots}
    with ExitStack() as engines:
        yield {
            name: engines.enter_context(
                closing(
                    open_engine(
                        registry, options.model, options.checkpoint, EngineConfig(**{**settings, **variant}), silent
                    )
                )
            )
            for name, variant in variants.items()
        }


def main() -> None:
    """Measure and print; write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3vl")
    parser.add_argument("--checkpoint", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk of it")
    parser.add_argument("--burst", type=int, default=32, help="requests of a burst")
    parser.add_argument("--tokens", type=int, default=32, help="generated tokens of each, on average")
    parser.add_argument(
        "--load", type=float, default=0.7, help="rate of the random arrivals, as a share of the burst's"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile the decode step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    length = 2 * options.prompt
    chunks = {"chunked": {"max_length": length, "prefill_chunk": options.chunk},
              "whole": {"max_length": length, "prefill_chunk": length}}  # fmt: skip
    with opened(options, chunks) as engines:
        gap = measure_gaps(options, engines)
    with opened(options, {name: {"scheduler": name, "max_length": 512} for name in SCHEDULERS}) as engines:
        served = measure_throughput(options, engines)
    ratios = {
        "gap_p99_chunked_to_whole": gap["chunked"]["p99"] / gap["whole"]["p99"],
        "ttft_chunked_to_whole": gap["chunked"]["ttft"] / gap["whole"]["ttft"],
    }
    for kind in ("burst", "random"):
        for name in SCHEDULERS[1:]:
            for figure in ("tokens_per_s", "latency"):
                ratio = served[f"{name}, {kind}"][figure] / served[f"continuous, {kind}"][figure]
                ratios[f"{figure}_{kind}_{name}_to_continuous"] = ratio
    found = {"gaps_ms": gap, "served": served, "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()}}
    print(json.dumps(found, indent=1))
    if options.out:
        write(options, found)


def write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what was found, with the command, the machine and the settings, to `options.out`."""
    report = {
        **measured_where(torch.device("cpu")),
        "command": " ".join(["python", *sys.argv]),
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        **found,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
