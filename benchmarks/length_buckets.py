"""Does a long cache cost anything while it is mostly empty? Decode at the same live length in a short and a long cache.

    python benchmarks/length_buckets.py --checkpoint DIR --live 200 --caches 512,4096

Three contenders take turns in every round: the short cache, the long cache with length buckets, and the long cache with one
bucket that is as long as the cache, which is what masking instead of slicing costs. `scripts/make_random_checkpoint.py` writes
checkpoints of true shapes with random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from kaminari_core.bench import machine_facts, versions
from kaminari_core.cache import StaticCache
from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.decode import DecodeCore
from kaminari_core.launch import load_model
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry


def main() -> None:
    """Measure and print; write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3vl")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--kernels", default="auto", help="as the engine's setting")
    parser.add_argument("--live", type=int, default=200, help="tokens in the cache")
    parser.add_argument("--caches", default="512,4096", help="lengths of the short and the long cache")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of one turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    short, long = map(int, options.caches.split(","))
    device = torch.device("cpu")
    registry = load_registry()
    spec, folder = resolve(registry, options.model, options.checkpoint)
    config = EngineConfig(device="cpu", max_length=long, kernels=options.kernels)
    model, config = load_model(registry, spec, folder, config, silent)

    def core(length: int) -> DecodeCore:
        return DecodeCore(model, StaticCache(model.shape, 1, length, device, model.dtype), compile=True)

    contenders = {f"cache {short}": core(short), f"cache {long}": core(long), f"cache {long}, one bucket": core(long)}
    contenders[f"cache {long}, one bucket"].length_buckets = (long,)
    at = [[options.live]]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for counted in [False, *[True] * options.rounds]:
        for name, contender in contenders.items():
            started = time.perf_counter()
            for _ in range(options.steps):
                contender.step([[1]], at, at)
            if counted:
                seconds[name].append((time.perf_counter() - started) / options.steps)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    first = next(iter(medians.values()))
    for name, median in medians.items():
        print(f"{name:24} {median * 1000:8.2f} ms/token  {median / first:5.2f} x")
    if options.out:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine_facts(device),
            "versions": versions(),
            "settings": {
                "live": options.live,
                "steps": options.steps,
                "rounds": options.rounds,
                "kernels": config.kernels,
                "quantizer": config.quantizer,
                "dtype": str(model.dtype),
            },
            "shape": {"layers": model.shape.layers, "hidden": model.shape.hidden, "kv_heads": model.shape.kv_heads},
            "ms_per_token": {name: round(median * 1000, 3) for name, median in medians.items()},
            "ratio_to_short_cache": {name: round(median / first, 3) for name, median in medians.items()},
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
