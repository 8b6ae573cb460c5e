r"""Is the memory plan right? Serves the worst that was planned for in a fresh process, and compares its peak with the plan.

    python scripts/make_random_checkpoint.py --size 2b --out build/random-2b
    python scripts/make_random_checkpoint.py --size glmocr --out build/random-glmocr
    python benchmarks/memory_plan.py --model qwen3vl --checkpoint build/random-2b \
        --model glmocr --checkpoint build/random-glmocr \
        --model qwen3vl --checkpoint tiny --model glmocr --checkpoint tiny --out benchmarks/results/memory_plan.json

Each slot gets a request with an A4 page of the largest budget and words that fill the cache, all at once, and writes until the
cache is full: so every position of the cache is touched, and the vision tower, the longest prompt and a full step all happen.
`resident` is the peak resident memory of the process up to the end, the libraries included; `tensors` is the peak of torch's
own allocations while one such request is embedded, prefilled and decoded, to the byte, weights left out. Linux only.
On a card (`--device cuda`), `tensors` is the peak that torch's allocator reports for all of it, weights included, and `card` is
what the driver has given to this process at the end, beside the context that it had before.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from load_memory import status

LIMIT = 0.1


def main() -> None:
    """Measure each checkpoint in a process of its own; exits with 1 when a plan is off by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--checkpoint", action="append", required=True)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--visual-tokens", type=int, default=512)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="compile, and on a card capture, every step")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return
    results = [child(options, *pair) for pair in zip(options.model, options.checkpoint, strict=True)]
    report = {"command": " ".join(["python", *sys.argv]), "limit": LIMIT, "results": results, **facts(options.device)}
    print(json.dumps(report, indent=2))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(result["worst"] > LIMIT for result in results))


def child(options: argparse.Namespace, model: str, checkpoint: str) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    settings = [
        f"--{name}={getattr(options, name.replace('-', '_'))}"
        for name in ("slots", "max-length", "visual-tokens", "draft", "dtype", "device")
    ]
    settings += ["--compile"] if options.compile else []
    command = [sys.executable, __file__, "--child", "--model", model, "--checkpoint", checkpoint, *settings]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Plan, serve and compare in this process."""
    from kaminari_core.checkpoint import resolve
    from kaminari_core.config import EngineConfig
    from kaminari_core.fit.cases import make_case
    from kaminari_core.fit.plan import make_plan
    from kaminari_core.launch import engine_over, load_model
    from kaminari_core.progress import silent
    from kaminari_core.registry import load_registry

    registry = load_registry()
    spec, folder = resolve(registry, options.model[0], options.checkpoint[0])
    config = EngineConfig(
        device=options.device, dtype=options.dtype, slots=options.slots, max_length=options.max_length,
        visual_tokens=options.visual_tokens, draft=options.draft, compile=options.compile, prepare_threads=1,
    )  # fmt: skip
    plan = make_plan(make_case(spec, folder, config, "cpu" if options.device == "cpu" else "cuda"), config)
    started = time.perf_counter()
    free = free_on_card(options.device)
    model, config = load_model(registry, spec, folder, config, silent)
    request = longest(model, config)
    engine = engine_over(registry, spec, model, config)
    if options.compile:
        engine.warm_up(silent)
    engine.start()
    tokens = fill(engine, request)
    engine.close()
    peaks = on_card(plan, free, options.device) if free else on_cpu(plan, model, config, request)
    return {
        "model": spec.name,
        "checkpoint": Path(options.checkpoint[0]).name,
        "device": options.device,
        "dtype": config.dtype,
        "quantizer": config.quantizer,
        "compile": config.compile,
        "slots": config.slots,
        "max_length": config.max_length,
        "visual_tokens": config.visual_tokens,
        "draft": config.draft,
        **peaks,
        "weights": plan.case.weights.total,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - started, 1),
        "worst": max(abs(peak["off"]) for name, peak in peaks.items() if name != "card"),
    }


def on_cpu(plan: Any, model: Any, config: Any, request: Any) -> dict[str, Any]:
    """The peaks of this process, which has served, and of one more request by itself."""
    resident = status("VmHWM")
    gc.collect()
    work = plan.group("cache") + max(size for phase, size in plan.phases.items() if phase != "loading")
    return {
        "resident": compared(plan.total, resident),
        "tensors": compared(work, peak_of_one(model, config, request)),
    }


def on_card(plan: Any, free: int, device: str) -> dict[str, Any]:
    """The peaks of a card that has served; `free` is what was free before the weights were there."""
    import torch

    now, _ = torch.cuda.mem_get_info(device)
    return {
        "card": compared(plan.total - plan.group("process"), free - now),
        "tensors": compared(plan.allocated, torch.cuda.max_memory_allocated(device)),
    }


def free_on_card(device: str) -> int:
    """What is free on a card beside this process's context; 0 on a CPU."""
    import torch

    if device == "cpu":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def compared(planned: int, measured: int) -> dict[str, Any]:
    """Both figures, and how far the plan is off: above zero, it is larger than what was measured."""
    return {"planned": planned, "measured": measured, "off": round(planned / measured - 1, 4)}


def peak_of_one(model: Any, config: Any, request: Any) -> int:
    """The peak of allocations of one request that is as long as the cache."""
    from kaminari_core.cache import StaticCache
    from kaminari_core.fit.measured import allocation_peak, serve_once

    prepared = model.prepare(request)

    def serve() -> None:
        width = 1 if config.draft == "none" else config.draft_tokens + 1
        cache = StaticCache(model.shape, config.slots, config.max_length, model.device, model.dtype, width=width)
        serve_once(model, cache, prepared, chunk=config.prefill_chunk)

    return allocation_peak(serve, model.device)


def fill(engine: Any, request: Any) -> int:
    """Serve the request once per slot at the same time, each until its slot is full; returns the tokens that were made."""
    import queue
    from dataclasses import replace

    from kaminari_core.flow import Failed, Finished

    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for slot in range(engine.config.slots):
        engine.submit(replace(request, id=f"slot {slot}", ignore_end=True, max_tokens=10_000), events.put)
    left, tokens = engine.config.slots, 0
    while left:
        event = events.get()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            left -= 1
            tokens += event.result.usage.completion_tokens
    return tokens


def longest(model: Any, config: Any) -> Any:
    """A request of an A4 page at 300 dpi and as many words as leave a few positions for the reply."""
    import io

    import numpy as np
    from PIL import Image

    from kaminari_core.flow import ImagePart, Message, Request, TextPart

    pixels = np.random.default_rng(0).integers(0, 256, (3508, 2480, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "BMP")
    page = ImagePart(buffer.getvalue(), "page")

    def length(*parts: Any) -> int:
        return int(model.prepare(Request((Message("user", parts),))).length)

    words = length(TextPart("x " * 30)) - length(TextPart("x " * 20))
    room = config.max_length - length(page, TextPart("x ")) - 16
    return Request((Message("user", (page, TextPart("x " * (room * 10 // words)))),))


def facts(device: str) -> dict[str, Any]:
    """The machine and the versions."""
    import torch

    from kaminari_core.bench import machine_facts, versions

    return {"machine": machine_facts(torch.device(device)), "versions": versions()}


if __name__ == "__main__":
    main()
