"""How much memory does loading take? Loads a checkpoint in a fresh process, generates, and compares the peak with its size.

    python scripts/make_random_checkpoint.py --size 2b --out build/random-2b
    python benchmarks/load_memory.py --checkpoint build/random-2b --out benchmarks/results/load_memory.json

What is compared is the peak resident memory of the whole process (VmHWM in /proc/self/status), interpreter and libraries
included, up to the end of the load. It counts pages of mapped checkpoint files as long as they are mapped, which is the strict
reading: the page cache behind them is the system's and could be dropped. A thread samples the anonymous and the mapped part, to
show which of the two a peak is made of. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LIMIT = 1.3


def main() -> None:
    """Run the child process, print what it found, write JSON with `--out`; exits with 1 above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4, help="tokens to generate after the load")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.checkpoint, options.dtype, options.tokens)))
        return
    child = subprocess.run([sys.executable, *sys.argv, "--child"], check=True, stdout=subprocess.PIPE, text=True)
    report = {"command": " ".join(["python", *sys.argv]), "limit": LIMIT, **json.loads(child.stdout)}
    print(json.dumps(report, indent=2))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(report["ratio"] > LIMIT)


def measure(checkpoint: Path, dtype: str, tokens: int) -> dict[str, Any]:
    """Load and generate in this process."""
    import torch

    from kaminari_core.bench import machine_facts, versions
    from kaminari_core.config import EngineConfig
    from kaminari_core.flow import Message, Request, TextPart
    from kaminari_core.parity import greedy
    from kaminari_core.progress import silent
    from kaminari_qwen3vl.model import load

    device = torch.device("cpu")
    files = sorted(checkpoint.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    before = status("VmRSS")
    sampler = Sampler()
    started = time.perf_counter()
    model = load(checkpoint, EngineConfig(device="cpu", dtype=dtype, max_length=512), device, silent)
    seconds = time.perf_counter() - started
    sampler.stop()
    peak = status("VmHWM")
    after = status("VmRSS")
    prepared = model.prepare(Request((Message("user", (TextPart("Hello"),)),)))
    run = greedy(model, prepared, tokens)
    return {
        "checkpoint_bytes": size,
        "shards": len(files),
        "dtype": dtype,
        "load_seconds": round(seconds, 1),
        "resident_before": before,
        "resident_after": after,
        "peak_resident": peak,
        "sampled_peak_anonymous": sampler.anonymous,
        "sampled_peak_mapped": sampler.mapped,
        "ratio": round(peak / size, 3),
        "generated": len(run.tokens),
        "machine": machine_facts(device),
        "versions": versions(),
    }


class Sampler(threading.Thread):
    """Keeps the largest anonymous and mapped sizes it sees, every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.mapped = 0
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._ended.wait(0.005):
            self.anonymous = max(self.anonymous, status("RssAnon"))
            self.mapped = max(self.mapped, status("RssFile"))

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()


def status(key: str) -> int:
    """One memory size of this process in bytes, from /proc/self/status."""
    with open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


if __name__ == "__main__":
    main()
