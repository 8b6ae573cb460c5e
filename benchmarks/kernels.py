"""The CPU kernels against torch's, one operator at a time, on the decoder shapes of a 2B model.

    python benchmarks/kernels.py --out benchmarks/results/kernels.json

Every contender of one product takes a turn in every round, over copies of its weight that together are larger than the caches, so
that the weight comes from memory as it does in a decode step; medians over the rounds. The read bandwidth is measured in the
same rounds: what a product of few rows can reach at most. `--quick` is a rehearsal with small shapes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kaminari_core.bench import machine_facts, versions
from kaminari_core.kernels import library, operators
from kaminari_core.ladder.bandwidth import ReadBandwidth, pages
from kaminari_core.layers import masked_attention
from kaminari_core.progress import silent
from kaminari_core.quantization.layouts import AtenLayout, Layout, OwnLayout
from kaminari_core.quantization.scheme import Codes, Scheme

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPES = {
    "qkv": (4096, 2048),
    "o": (2048, 2048),
    "gate_up": (12288, 2048),
    "down": (2048, 6144),
    "head": (151936, 2048),
}
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128

Contender = Callable[[int], Any]


class Weights:
    """Copies of one weight, in every form; `bytes` of a form are those of one copy."""

    def __init__(self, n: int, k: int, total: int, huge: bool) -> None:
        generator = torch.Generator().manual_seed(n + k)
        self.copies = max(1, min(16, total // (n * k)))
        self.full = [torch.randn(n, k, generator=generator, dtype=BF16) for _ in range(self.copies)]
        self.own4 = [_packed(OwnLayout(n, k, Scheme(4)), generator) for _ in range(self.copies)]
        self.own8 = [_packed(OwnLayout(n, k, Scheme(8)), generator) for _ in range(self.copies)]
        self.aten = [_packed(AtenLayout(n, k, Scheme(4), CPU, BF16), generator) for _ in range(self.copies)]
        if huge:
            for layout in (*self.own4, *self.own8, *self.aten):
                for buffer in layout.buffers():
                    operators.huge_pages(buffer, now=True)
            for weight in self.full:
                operators.huge_pages(weight, now=True)

    def contenders(self, rows: int) -> dict[str, tuple[Contender, int]]:
        """By name: the product with copy i, and the bytes of weights it reads."""
        n, k = self.full[0].shape
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows), dtype=BF16)

        def own(layouts: list[Layout], bits: int) -> tuple[Contender, int]:
            def run(copy: int) -> torch.Tensor:
                layouts[copy].activation_bits = bits  # type: ignore[assignment]
                out: torch.Tensor = layouts[copy](x)
                return out

            return run, _bytes(layouts[0])

        found = {
            "own 4-bit, 8-bit activations": own(self.own4, 8),
            "own 4-bit, 16-bit activations": own(self.own4, 16),
            "own 8-bit, 8-bit activations": own(self.own8, 8),
            "torch 4-bit": (lambda copy: self.aten[copy](x), _bytes(self.aten[0])),
            "torch bfloat16": (lambda copy: F.linear(x, self.full[copy]), n * k * 2),
        }
        if rows <= 16:
            found["own bfloat16"] = (lambda copy: operators.linear_bf16(x, self.full[copy]), n * k * 2)
        return found


def _packed(layout: Layout, generator: torch.Generator) -> Layout:
    """Random codes: what they mean does not matter for the time."""
    groups = layout.columns // layout.scheme.group
    step = 4096
    for start in range(0, layout.rows, step):
        rows = min(step, layout.rows - start)
        codes = torch.randint(
            0, layout.scheme.levels + 1, (rows, layout.columns), generator=generator, dtype=torch.uint8
        )
        zeros = torch.full((rows, groups), (layout.scheme.levels + 1) // 2, dtype=torch.uint8)
        layout.place(start, Codes(codes, torch.full((rows, groups), 0.01), zeros))
    layout.finish()
    return layout


def _bytes(layout: Layout) -> int:
    return sum(buffer.nbytes for buffer in layout.buffers())


def compare(
    contenders: Mapping[str, tuple[Contender, int]], copies: int, rounds: int, read: ReadBandwidth
) -> dict[str, Any]:
    """Milliseconds of one call of each contender, and the bandwidth that was measured between their turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    bandwidth = []
    for _ in range(rounds):
        bandwidth.append(read.measure(1))
        for name, (run, _) in contenders.items():
            run(0)
            started = time.perf_counter()
            for copy in range(copies):
                run(copy)
            times[name].append((time.perf_counter() - started) / copies)
    roof = statistics.median(bandwidth)
    figures = {}
    for name, (_, size) in contenders.items():
        seconds = statistics.median(times[name])
        figures[name] = {
            "ms": round(seconds * 1e3, 4),
            "gb_per_s": round(size / seconds / 1e9, 2),
            "of_bandwidth": round(size / seconds / roof, 3),
        }
    return {"read_gb_per_s": round(roof / 1e9, 2), "contenders": figures}


def attention(live: int, length: int, rows: int, layers: int) -> tuple[dict[str, tuple[Contender, int]], int]:
    """Decode attention at `live` positions of a cache of `length`, over the caches of several layers."""
    cache = torch.randn(2, layers, rows, KV_HEADS, length + 1, HEAD_DIM).to(BF16)
    query = torch.randn(rows, 1, HEADS, HEAD_DIM).to(BF16)
    cursors = torch.full((rows, 1), live - 1)

    def sliced(bound: int) -> Contender:
        mask = (torch.arange(bound) <= cursors[:, :, None])[:, None].repeat(1, 1, HEADS // KV_HEADS, 1)
        return lambda layer: masked_attention(query, cache[0, layer], cache[1, layer], mask)

    size = rows * live * KV_HEADS * HEAD_DIM * 2 * 2
    return {
        "own": (lambda layer: operators.decode_attention(query, cache[0, layer], cache[1, layer], cursors), size),
        "torch, sliced to the length": (sliced(live), size),
        "torch, masked over the cache": (sliced(length), size),
    }, layers


def main() -> None:
    """Measure, print, and write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--prefill", type=int, default=512, help="rows of a prompt")
    parser.add_argument("--small-pages", action="store_true", help="do not ask for large pages")
    parser.add_argument("--quick", action="store_true", help="small shapes, one round")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    library.load(silent)
    rounds = 1 if options.quick else options.rounds
    total, buffer = (1 << 20, 8 << 20) if options.quick else (192 << 20, 512 << 20)
    read = ReadBandwidth(CPU, buffer)
    results: dict[str, Any] = {
        "machine": machine_facts(CPU),
        "versions": versions(),
        "pages": {**pages(), "own": not options.small_pages},
        "instructions": library.instructions(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "products": {},
        "attention": {},
    }
    for name, (n, k) in SHAPES.items():
        weights = (
            Weights(n // 256 * 16, k // 16 * 2, total, False)
            if options.quick
            else Weights(n, k, total, not options.small_pages)
        )
        counts = [int(rows) for rows in options.rows.split(",")] + [options.prefill] * (name != "head")
        for rows in counts:
            few = 1 if rows == options.prefill else weights.copies
            found = compare(weights.contenders(rows), few, min(rounds, 3) if rows == options.prefill else rounds, read)
            results["products"][f"{name}, {rows} rows"] = {"shape": [n, k], "rows": rows, **found}
            _show(f"{name} ({n} x {k}), {rows} rows", found)
    for live, length, rows in ((512, 512, 1), (512, 4096, 1), (4096, 4096, 1), (512, 512, 4)):
        contenders, layers = (
            attention(live // 16, length // 16, rows, 2) if options.quick else attention(live, length, rows, 28)
        )
        found = compare(contenders, layers, rounds, read)
        results["attention"][f"{live} of {length}, {rows} rows"] = found
        _show(f"attention, {live} of {length} positions, {rows} rows", found)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def _show(title: str, found: Mapping[str, Any]) -> None:
    print(f"{title}; memory read at {found['read_gb_per_s']} GB/s", flush=True)
    for name, figures in found["contenders"].items():
        print(f"  {name:30} {figures['ms']:9.3f} ms  {figures['gb_per_s']:6.1f} GB/s  {figures['of_bandwidth']:.2f}")


if __name__ == "__main__":
    main()
