"""Serve a mix of everything for a while, and hold the engine to it: what it says, what it leaves behind, what it grows to.

    python benchmarks/soak.py --seconds 900
    python benchmarks/soak.py --seconds 60 --kill-every 15

Clients send texts and pictures of random sizes, leave at random points, set time limits too short to be met, and send what
cannot be read. Every reply must equal the reply that the same request got alone, and what came of one that was cut must be how
that begins. At the end no request may be left anywhere, and the engine's process may not have grown after the first third. The
model is the small random decoder of `kaminari_core.testing`; `--kill-every` also kills the process now and then.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from kaminari_core.config import EngineConfig
from kaminari_core.errors import DeadlineError, EngineRestartedError, QueueFullError, RequestError
from kaminari_core.flow import Delta, Failed, Finished, ImagePart, Message, Part, Request, TextPart
from kaminari_core.hookspecs import hookimpl
from kaminari_core.launch import open_supervised
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_core.specs import ModelSpec
from kaminari_core.supervise.engine import SupervisedEngine
from kaminari_core.testing import TinyModel

GROWTH = 32 * 2**20
"""Bytes that allocators may still take after the first third."""


def load(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Any) -> TinyModel:
    """The model, in the engine's process."""
    return TinyModel(config)


@hookimpl
def kaminari_models() -> Iterable[ModelSpec]:
    """The one model of this file, which is the plugin."""
    return [ModelSpec(name="soak", target="soak:load", model_types=("soak",))]


class Soak:
    """The clients, and what they saw."""

    def __init__(self, engine: SupervisedEngine, requests: int, seed: int) -> None:
        self.engine = engine
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._asked = [self._request(random.Random(seed + index)) for index in range(requests)]
        self._alone = [engine.generate(self._copy(index)).text for index in range(requests)]

    def client(self, seed: int, until: float) -> None:
        """Send requests until the time is over."""
        chance = random.Random(seed)
        while time.monotonic() < until:
            try:
                self.counts[self._one(chance)] += 1
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _one(self, chance: random.Random) -> str:
        """One request of a random kind; returns what it was."""
        kind = chance.choices(["whole", "leave", "late", "malformed"], [6, 2, 1, 1])[0]
        if kind == "malformed":
            return self._malformed(chance)
        index = chance.randrange(len(self._asked))
        leave = chance.randrange(1, 30) if kind == "leave" else -1
        timeout = chance.uniform(0.001, 0.1) if kind == "late" else None
        said, events = "", 0
        try:
            for event in self.engine.stream(self._copy(index, timeout)):
                events += 1
                if isinstance(event, Delta):
                    said += event.text
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished) and (said != event.result.text or said != self._alone[index]):
                    self.wrong.append(f"{said!r} is not {self._alone[index]!r}")
                if events == leave:
                    break
        except (DeadlineError, EngineRestartedError, QueueFullError) as error:
            kind = type(error).__name__
        if not self._alone[index].startswith(said):
            self.wrong.append(f"{said!r} is not the beginning of {self._alone[index]!r}")
        return kind

    def _malformed(self, chance: random.Random) -> str:
        broken = chance.choice(
            [
                Request((Message("user", (ImagePart(chance.randbytes(200)),)),)),
                Request((Message("user", (TextPart("x" * 5000),)),)),
                Request((Message("user", (TextPart("x"),)),), max_tokens=0),
            ]
        )
        try:
            self.engine.generate(broken)
        except RequestError:
            return "malformed"
        except (EngineRestartedError, QueueFullError) as error:
            return type(error).__name__
        raise AssertionError("what cannot be served was served")

    def _request(self, chance: random.Random) -> Request:
        parts: list[Part] = [TextPart("".join(chance.choices("abcdefgh ", k=chance.randint(1, 400))))]
        for _ in range(chance.choice([0, 0, 1, 2])):
            size = chance.randint(32, 300), chance.randint(32, 300)
            file = io.BytesIO()
            Image.frombytes("RGB", size, chance.randbytes(3 * size[0] * size[1])).save(file, "PNG")
            parts.insert(chance.randrange(len(parts) + 1), ImagePart(file.getvalue()))
        tokens = chance.randint(1, 60)
        return Request((Message("user", tuple(parts)),), max_tokens=tokens, ignore_end=chance.random() < 0.5)

    def _copy(self, index: int, timeout: float | None = None) -> Request:
        asked = self._asked[index]
        return Request(asked.messages, max_tokens=asked.max_tokens, ignore_end=asked.ignore_end, timeout=timeout)


def resident(pid: int | None) -> int:
    """Resident bytes of a process, 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def observe(engine: SupervisedEngine, seconds: float, kill_every: float) -> dict[int, list[int]]:
    """Sample the memory of the engine's process, by process id, and kill it as often as asked."""
    began = killed = time.monotonic()
    samples: dict[int, list[int]] = {}
    while time.monotonic() < began + seconds:
        time.sleep(0.5)
        pid = engine.process_id
        if pid is None:
            continue
        if size := resident(pid):
            samples.setdefault(pid, []).append(size)
        if kill_every and time.monotonic() - killed > kill_every:
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
    return samples


def settle(engine: SupervisedEngine) -> dict[str, int]:
    """What is left in the engine once nobody asks any more."""
    deadline = time.monotonic() + 60
    while True:
        stats = engine.stats()
        left = {name: getattr(stats, name) for name in ("preparing", "waiting", "running", "slots_busy")}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def main() -> None:
    """Run, print what happened as JSON, and exit with 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--requests", type=int, default=24, help="different requests to choose from")
    parser.add_argument("--kill-every", type=float, default=0, help="seconds between kills of the process; 0 for none")
    parser.add_argument("--scheduler", default="continuous")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plugins = [EntryPoint("core", "kaminari_core.builtin", "kaminari"), EntryPoint("soak", "soak", "kaminari")]
    config = EngineConfig(
        device="cpu", dtype="float32", compile=False, slots=4, max_length=1024, prefill_chunk=64, visual_tokens=64,
        scheduler=options.scheduler, stall_seconds=60,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text('{"model_type": "soak"}')
        with open_supervised(load_registry(plugins), folder, None, config, silent) as engine:
            soak = Soak(engine, options.requests, options.seed)
            until = time.monotonic() + options.seconds
            clients = [
                threading.Thread(target=soak.client, args=(options.seed + index, until))
                for index in range(options.clients)
            ]
            for client in clients:
                client.start()
            samples = observe(engine, options.seconds, options.kill_every)
            for client in clients:
                client.join()
            left, stats = settle(engine), engine.stats()
    growth = {
        pid: max(sizes) - max(sizes[: max(1, len(sizes) // 3)]) for pid, sizes in samples.items() if len(sizes) > 30
    }
    wrong = soak.wrong + [f"{count} are still {name}" for name, count in left.items() if count]
    wrong += [f"process {pid} grew by {size} bytes" for pid, size in growth.items() if size > GROWTH]
    print(
        json.dumps(
            {
                "seconds": options.seconds,
                "requests": dict(soak.counts),
                "finished": dict(stats.finished),
                "mean_batch": round(stats.rows / max(1, stats.steps), 2),
                "restarts": stats.restarts,
                "growth_bytes": max(growth.values(), default=0),
                "wrong": wrong[:20],
            },
            indent=1,
        )
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
