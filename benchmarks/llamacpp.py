"""kaminari beside llama.cpp on the same weights, prompt and threads, in one run.

    python benchmarks/make_gguf.py --checkpoint build/random-2b --type Q4_0 --out build/random-2b-q4_0.gguf
    python benchmarks/make_gguf.py --checkpoint build/random-2b --type BF16 --out build/random-2b-bf16.gguf
    python -m venv build/llamacpp/venv && build/llamacpp/venv/bin/pip install llama-cpp-python numpy
    python benchmarks/llamacpp.py --python build/llamacpp/venv/bin/python --q4 build/random-2b-q4_0.gguf
        --bf16 build/random-2b-bf16.gguf --checkpoint build/random-2b --packed DIR --out benchmarks/results/llamacpp.json

Every contender is a process that waits while the others have their turn. Each side runs with the pages it takes by itself, and
with the other side's: ours asks for huge pages, so it also runs without them; llama.cpp does not, so it also runs with the C
library asking for them and without mapping the file. How much of a process really lies in huge pages is read from the system.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kaminari_core.bench import measured_where
from kaminari_core.ladder.bandwidth import pages
from kaminari_core.placement import resolve_device

HERE = Path(__file__).parent
HUGE_THEIRS = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Worker:
    """One contender in a process of its own."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name, self.command, self.environment = name, command, environment
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self._answer()

    def turn(self, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        """Let it prefill and decode once."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tokens": tokens, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def memory(self) -> dict[str, int]:
        """Bytes that are resident, and those of them in anonymous huge pages."""
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text(encoding="ascii")
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}
        return {"resident": sizes["Rss"], "huge": sizes["AnonHugePages"]}

    def close(self) -> None:
        """End the process by ending its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}: {' '.join(self.command)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def commands(options: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """The command and the environment of each contender."""
    context = str(options.prompt_tokens + options.new_tokens)
    sizes = ["--threads", str(options.threads), "--context", context]
    ours = [sys.executable, str(HERE / "engine_worker.py"), "--model", options.model, *sizes]
    ours += ["--prompt-tokens", str(options.prompt_tokens)]
    theirs = [options.python, str(HERE / "llamacpp_worker.py"), *sizes]
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    if options.packed:
        int4 = [*ours, "--checkpoint", options.packed]
        found["kaminari int4"] = int4, {}
        found["kaminari int4, 4 KiB pages"] = [*int4, "--small-pages"], {}
    found["kaminari bf16"] = [*ours, "--checkpoint", options.checkpoint], {}
    if options.q4:
        q4 = [*theirs, "--gguf", options.q4]
        found["llama.cpp Q4_0"] = q4, {}
        found["llama.cpp Q4_0, huge pages"] = [*q4, "--no-mmap"], HUGE_THEIRS
    if options.bf16:
        found["llama.cpp BF16"] = [*theirs, "--gguf", options.bf16], {}
    return found


def main() -> None:
    """Measure and print; write JSON with `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--model", default="qwen3vl")
    parser.add_argument("--checkpoint", required=True, help="the checkpoint that the files were made from")
    parser.add_argument("--packed", help="its packed int4 directory")
    parser.add_argument("--q4", help="its GGUF file in Q4_0")
    parser.add_argument("--bf16", help="its GGUF file in BF16")
    parser.add_argument("--prompt-tokens", type=int, default=480)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=420.0, help="time budget; fewer rounds rather than longer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    with ExitStack() as running:
        workers = []
        for name, (command, environment) in commands(options).items():
            workers.append(Worker(name, command, environment))
            running.callback(workers[-1].close)
        tokens = next(worker.facts["tokens"] for worker in workers if "tokens" in worker.facts)
        turns = measure(workers, tokens, options, ends)
        results = [figures(worker, turns[worker.name], options.new_tokens) for worker in workers]
    compare(results)
    for one in results:
        print(
            f"{one['contender']:30} {one['tokens_per_s']:7.2f} tokens/s  {one['ratio']:5.2f} x  TTFT {one['ttft'] * 1000:7.0f} ms"
            f"  huge pages {one['memory']['huge'] / one['memory']['resident']:.0%}"
        )
    if options.out:
        write(options, results, len(tokens))


def measure(
    workers: list[Worker], tokens: list[int], options: argparse.Namespace, ends: float
) -> dict[str, list[dict[str, Any]]]:
    """Turns of every worker, after one with a short prompt that warms up. One round is always made."""
    turns: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for worker in workers:
        worker.turn(tokens[:16], 3)
    longest = 0.0
    for made in range(options.rounds):
        started = time.monotonic()
        if made and started + longest > ends:
            print(f"the time is up after {made} of {options.rounds} rounds")
            break
        for worker in workers:
            turns[worker.name].append(worker.turn(tokens, options.new_tokens))
        longest = max(longest, time.monotonic() - started)
    return turns


def figures(worker: Worker, turns: list[dict[str, Any]], new_tokens: int) -> dict[str, Any]:
    """The medians of one contender."""
    speeds = [(new_tokens - 1) / turn["seconds"] for turn in turns]
    median = statistics.median(speeds)
    return {
        "contender": worker.name,
        "tokens_per_s": median,
        "spread": (max(speeds) - min(speeds)) / median,
        "ttft": statistics.median(turn["ttft"] for turn in turns),
        "memory": worker.memory(),
        # Where the sides agree here, they compute the same model.
        "begins_with": turns[-1]["tokens"][:4],
        "command": shown(worker),
        "facts": {key: value for key, value in worker.facts.items() if key != "tokens"},
        "turns": [{key: turn[key] for key in ("ttft", "seconds")} for turn in turns],
    }


def compare(results: list[dict[str, Any]]) -> None:
    """Add each contender's speed over that of llama.cpp's Q4_0 with the pages it gets by itself."""
    first = next((one for one in results if one["contender"] == "llama.cpp Q4_0"), results[0])
    for one in results:
        one["ratio"] = one["tokens_per_s"] / first["tokens_per_s"]


def shown(worker: Worker) -> str:
    """A worker's command as it can be typed."""
    environment = [f"{name}={value}" for name, value in worker.environment.items()]
    interpreter = "python" if worker.command[0] == sys.executable else worker.command[0]
    script = f"benchmarks/{Path(worker.command[1]).name}"
    return " ".join([*environment, interpreter, script, *worker.command[2:]])


def write(options: argparse.Namespace, results: list[dict[str, Any]], prompt: int) -> None:
    """Write the report."""
    report = {
        **measured_where(resolve_device("cpu")),
        "command": " ".join(["python", "benchmarks/llamacpp.py", *sys.argv[1:]]),
        "pages": pages(),
        "settings": {
            "prompt_tokens": prompt,
            "new_tokens": options.new_tokens,
            "rounds": len(results[0]["turns"]),
            "threads": options.threads,
        },
        "beside_llamacpp": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
