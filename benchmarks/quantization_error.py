"""How far quantization moves the logits of a large decoder: packed checkpoints against full precision, on the same tokens.

    python scripts/make_random_checkpoint.py --size 2b --layers 4 --out build/random-2b-4
    python benchmarks/quantization_error.py --checkpoint build/random-2b-4 --out benchmarks/results/quantization_error.json

Every variant is fed the prompt and the tokens that full precision chose, so that its logits can be compared step by step:

    error       |logits - full logits| / |full logits - their mean|, over all steps
    divergence  mean Kullback-Leibler divergence of the next token's distribution, in nats
    agreement   share of steps with the same most likely token

Weights of random numbers are the hardest case for groups (no structure to use) and say nothing of the quality of text; the
readers in quantization_quality.py do. What they show is the size of the error and what each choice does to it. `own` kernels
round activations to 8 bits (or 16) as well; `plain` computes with the quantized weights alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kaminari_core.bench import machine_facts, versions
from kaminari_core.cache import StaticCache
from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.flow import Message, Request, TextPart
from kaminari_core.kernels.adoption import choose
from kaminari_core.layer_call import run_layer
from kaminari_core.progress import silent
from kaminari_core.protocols import Model, Quantizer, Step
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.manifest import PARTS
from kaminari_core.quantization.scheme import Codes, Scheme
from kaminari_core.quantization.selection import networks, targets
from kaminari_core.registry import Registry, load_registry

TEXT = "The invoice of 14 March lists three items: oat milk at 3.90, rye bread at 2.75 and tomato soup at 1.80. " * 2
# quantizer, group, scale, head
WAYS = (
    ("int4", 64, "rtn", "none"),
    ("int4", 64, "mse", "none"),
    ("int4", 32, "mse", "none"),
    ("int4", 128, "mse", "none"),
    ("int4", 64, "mse", "int8"),
    ("int4", 64, "mse", "int4"),
    ("int8", 64, "mse", "none"),
    ("int8", 64, "mse", "int8"),
)


def main() -> None:
    """Parse the command line, print the table, and write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3vl")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ways", type=int, nargs="+", default=range(len(WAYS)), help="numbers of those to try, from 0")
    parser.add_argument("--kernels", nargs="+", default=["plain", "own"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    registry = load_registry()
    if "own" in options.kernels:
        choose("own", torch.device("cpu"), silent)
    rows: list[dict[str, Any]] = []
    spec, folder = resolve(registry, options.model, options.checkpoint)
    config = EngineConfig(device="cpu", dtype=options.dtype, compile=False, max_length=1024, kernels="plain")
    model: Model = spec.load()(folder, config, torch.device("cpu"), silent)
    tokens, full = run(model, options.steps, None)
    for way in (WAYS[number] for number in options.ways):
        codes = codes_of(registry, model, way)
        for kernels in options.kernels:
            with swapped(model, codes, kernels):
                _, logits = run(model, options.steps, tokens)
            names = dict(zip(("quantizer", "group", "scale", "head"), way, strict=True))
            rows.append({**names, "kernels": kernels, **compared(logits, full)})
            print(line(rows[-1]), flush=True)
            write(rows, options)


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write what there is so far: large checkpoints take minutes for each row."""
    if options.out is None:
        return
    settings = {"model": options.model, "checkpoint": Path(options.checkpoint).name, "steps": options.steps}
    report = {**facts(), **settings, "results": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def facts() -> dict[str, Any]:
    """How and where the figures were made."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "machine": machine_facts(torch.device("cpu")),
    }


def codes_of(registry: Registry, model: Model, way: tuple[str, int, str, str]) -> dict[str, Codes]:
    """The codes of every layer that `kaminari quantize` would convert, by its name; weights fused in the model at once."""
    quantizer, group, scale, head = way
    body = registry.quantizer(quantizer).load()()
    heads = body if head == "none" else registry.quantizer(head).load()()
    (network,) = networks(model).values()
    found = {}
    for target in targets(model, heads=head != "none"):
        chosen: Quantizer = heads if target.head else body
        scheme = Scheme(chosen.bits, group).for_columns(target.columns)
        assert scheme is not None, "groups that divide the columns"
        weight = network.get_parameter(f"{target.layer}.weight")
        parts = [chosen.quantize(rows, scheme, scale, None) for rows in torch.split(weight, 2048)]  # type: ignore[arg-type]
        found[target.layer] = Codes(*(torch.cat([getattr(one, part) for one in parts]) for part in PARTS))
    return found


@contextmanager
def swapped(model: Model, codes: Mapping[str, Codes], kernels: str) -> Iterator[None]:
    """The model with quantized layers in the place of its own."""
    (network,) = networks(model).values()
    kept = {name: network.get_submodule(name) for name in codes}
    for name, one in codes.items():
        rows, columns = one.codes.shape
        bits = 4 if int(one.codes.max()) < 16 else 8
        layer = QuantizedLinear(columns, rows, Scheme(bits, one.group), layout=kernels)  # type: ignore[arg-type]
        layer.place(0, one, torch.device("cpu"), model.dtype)
        network.set_submodule(name, layer)
    try:
        yield
    finally:
        for name, module in kept.items():
            network.set_submodule(name, module)


def run(model: Model, steps: int, tokens: list[int] | None) -> tuple[list[int], Tensor]:
    """The logits, float32 (steps, vocabulary), of a reply that is `tokens`, or the greedy one when None; and its tokens."""
    prepared = model.prepare(Request((Message("user", (TextPart(TEXT),)),)))
    cache = StaticCache(model.shape, 1, prepared.length + steps, model.device, model.dtype)
    logits = model.prefill(model.embed(prepared), 0, prepared.length, cache, cache.claim())
    kept, chosen = [logits.float()], []
    for step in range(steps - 1):
        chosen.append(int(kept[-1].argmax()) if tokens is None else tokens[step])
        fed = (chosen[-1], prepared.next_position + step, prepared.length + step)
        ids, positions, cursors = (torch.tensor([[value]]) for value in fed)
        with torch.inference_mode():
            decoded = model.decode(Step(ids, positions, cursors, prepared.length + step + 1), cache, run_layer)
        kept.append(decoded[0, 0].float())
    return chosen, torch.stack(kept)


def compared(logits: Tensor, full: Tensor) -> dict[str, float]:
    """The three figures."""
    divergence = torch.nn.functional.kl_div(
        logits.log_softmax(-1), full.log_softmax(-1), reduction="batchmean", log_target=True
    )
    centred = full - full.mean(-1, keepdim=True)
    return {
        "error": float((logits - full).norm() / centred.norm()),
        "divergence": float(divergence),
        "agreement": float((logits.argmax(-1) == full.argmax(-1)).float().mean()),
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table in docs/quantization.md."""
    return (
        f"| {row['quantizer']} | {row['group']} | {row['scale']} | {row['head']} | {row['kernels']} | {row['error']:.1%} "
        f"| {row['divergence']:.4f} | {row['agreement']:.0%} |"
    )


if __name__ == "__main__":
    main()
