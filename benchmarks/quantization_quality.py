"""What quantization costs in reading: a bundled reader, packed in every way that is offered, reads held-out lines.

    python scripts/make_pages.py --set build/calibration --pages line=64 --seed 777
    python benchmarks/quantization_quality.py --model qwen3vl --set tests/qwen3vl/data/lines --calibrate build/calibration

Prints one row per way: size of the checkpoint, mean relative error of the converted weights, mean relative error of the layers'
outputs on the calibration pages, character error rate and lines read exactly. `plain` kernels compute with the weights alone,
`own` ones round activations to 8 bits as well.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kaminari_core.bench import machine_facts, versions
from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.evaluation.sets import read_set
from kaminari_core.evaluation.text_score import TextScore, score_text
from kaminari_core.progress import silent
from kaminari_core.registry import Registry, load_registry

# quantizer, group, scale, head
WAYS: tuple[tuple[str, int, str, str], ...] = (
    *(("int4", group, scale, "none") for group in (64, 32) for scale in ("rtn", "mse", "activation")),
    *(("int4", group, "activation", head) for group in (64, 32) for head in ("int8", "int4")),
    ("int8", 64, "mse", "none"),
    ("int8", 64, "mse", "int8"),
)


def main() -> None:
    """Parse the command line, print the table, and write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint", default="tiny")
    parser.add_argument("--set", type=Path, required=True, dest="folder")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--kernels", nargs="+", default=["plain", "own"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    registry = load_registry()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folders = packed_folders(registry, options.model, options.checkpoint, options.calibrate, Path(name))
        for way, folder, known in folders:
            for kernels in options.kernels:
                score = read(registry, options.model, folder, options.folder, kernels)
                rows.append({**known, "way": way, "kernels": kernels, "cer": score.cer, **asdict(score)})
                print(f"{way}, {kernels}: {score.cer:.2%}", file=sys.stderr, flush=True)
    print(table(rows, options.kernels))
    if options.out is not None:
        settings = {"model": options.model, "checkpoint": options.checkpoint, "set": options.folder.name}
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


def packed_folders(
    registry: Registry, model: str, checkpoint: str, pages: Path, out: Path
) -> list[tuple[str, str, dict[str, Any]]]:
    """The checkpoint as it is and packed in every way: a name, what `--checkpoint` takes, and what packing said."""
    from kaminari_core.quantization.calibration import calibrate, calibration_pages
    from kaminari_core.quantization.packing import Order, pack
    from kaminari_core.quantization.source import open_source

    spec, folder = resolve(registry, model, checkpoint)
    source = open_source(folder)
    seen = calibrate(spec, folder, calibration_pages(pages), EngineConfig(compile=False), silent)
    found: list[tuple[str, str, dict[str, Any]]] = [("full precision", checkpoint, {"bytes": source.bytes})]
    for quantizer, group, scale, head in WAYS:
        name = f"{quantizer}, group {group}, {scale}" + ("" if head == "none" else f", head {head}")
        heads = None if head == "none" else registry.quantizer(head).load()()
        order = Order(quantizer, registry.quantizer(quantizer).load()(), heads, group, scale)  # type: ignore[arg-type]
        target = out / name.replace(", ", "-").replace(" ", "")
        report = pack(spec, source, target, order, seen, silent)
        errors = [stored.error for stored in report.stored.values() if stored.error is not None]
        outputs = [stored.output_error for stored in report.stored.values() if stored.output_error is not None]
        known = {
            "bytes": report.bytes_after,
            "error": statistics.mean(errors),
            "output_error": statistics.mean(outputs),
        }
        found.append((name, str(target), known))
    return found


def read(registry: Registry, model: str, checkpoint: str, folder: Path, kernels: str) -> TextScore:
    """Let the engine read the set, eight pages at a time."""
    import queue

    from kaminari_core.flow import Event, Failed, Finished, ImagePart, Message, Request, TextPart
    from kaminari_core.launch import open_engine

    samples = read_set(folder)
    config = EngineConfig(
        compile=False, slots=8, max_length=1024, max_tokens=400, queue=len(samples), kernels=kernels,  # type: ignore[arg-type]
    )  # fmt: skip
    engine = open_engine(registry, model, checkpoint, config, silent)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    truths: dict[str, str] = {}
    for sample in samples:
        parts = (ImagePart(sample.file.read_bytes(), sample.name), TextPart(engine.tasks["ocr"]))
        request = Request((Message("user", parts),))
        truths[request.id] = sample.text or ""
        engine.submit(request, events.put)
    score = TextScore()
    while truths:
        event = events.get()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            score += score_text(event.result.text, truths.pop(event.request_id))
    engine.close()
    return score


def table(rows: Sequence[dict[str, Any]], kernels: Sequence[str]) -> str:
    """The table in docs/quantization.md: one row per way, one column of error rates per choice of kernels."""
    lines = [
        f"| weights | MB | weight error | output error |{''.join(f' CER, {name} kernels |' for name in kernels)} exact lines |",
        "|" + " --- |" * (5 + len(kernels)),
    ]
    for way in dict.fromkeys(row["way"] for row in rows):
        found = [row for row in rows if row["way"] == way]
        errors = [f"{found[0][key]:.1%}" if key in found[0] else "" for key in ("error", "output_error")]
        rates = [f"{row['cer']:.2%}" for row in found]
        exact = f"{found[0]['exact_lines']} of {found[0]['lines']}"
        lines.append("| " + " | ".join([way, f"{found[0]['bytes'] / 1e6:.2f}", *errors, *rates, exact]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
