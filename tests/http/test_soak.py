"""Everything at once for a while: every reply is what it is alone, and afterwards nothing is left.

`KAMINARI_SOAK_SECONDS=900 pytest tests/http/test_soak.py` runs it for as long as one likes to wait.
"""

from __future__ import annotations

import json
import os
import random
import resource
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kaminari_core.testing import TinyModel
from tests.http.serving import Running, Start, picture, picture_message, raw_connection
from tests.http.test_native import events_of

SECONDS = float(os.environ.get("KAMINARI_SOAK_SECONDS", "6"))
CLIENTS = 5
MALFORMED: list[Any] = [
    {"messages": 3},
    {"prompt": "x", "images": ["data:image/png;base64,AAAA"]},
    {"prompt": "x" * 2000},
    {"prompt": "x", "top_p": 7},
]


def bodies() -> list[dict[str, Any]]:
    """Texts and pictures, greedy and drawn, short and long."""
    shapes = [(64, 64), (200, 90), (90, 200), (130, 130)]
    urls = [picture((40 * n, 250 - 30 * n, 70), size) for n, size in enumerate(shapes)]
    made: list[dict[str, Any]] = [{"prompt": f"number {n}", "max_tokens": 4 + 9 * n} for n in range(4)]
    made += [{"prompt": f"read {n}", "images": [url], "max_tokens": 6 + 5 * n} for n, url in enumerate(urls)]
    made += [{"messages": [picture_message(*urls[:2])], "max_tokens": 20, "priority": "batch"}]
    made += [{"prompt": "draw", "temperature": 1.0, "seed": seed, "max_tokens": 25} for seed in (1, 2)]
    return [*made, {"prompt": "p " * 150, "max_tokens": 12}]


class Client:
    """One of those who use the server; what it does is drawn."""

    def __init__(self, server: Running, expected: list[tuple[dict[str, Any], str]], seed: int, until: float) -> None:
        self._server, self._expected, self._until = server, expected, until
        self._random = random.Random(seed)
        self.done: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Go on until it is time."""
        actions = [self.ask] * 5 + [self.stream] * 3 + [self.leave] * 3 + [self.misspeak, self.hurry, self.count]
        while time.monotonic() < self._until:
            action = self._random.choice(actions)
            action()
            self.done[action.__name__] += 1
        return self.done

    def ask(self) -> None:
        body, text = self._random.choice(self._expected)
        reply = self._server.post("/generate", body, timeout=120)
        assert (reply.status_code, reply.json().get("text")) == (200, text), body

    def stream(self) -> None:
        body, text = self._random.choice(self._expected)
        *tokens, last = events_of(self._server.post("/generate_stream", body, timeout=120).text)
        assert "".join(event["text"] for event in tokens) == last["text"] == text

    def leave(self) -> None:
        """Close the connection somewhere between the first byte sent and the last received."""
        body, _ = self._random.choice(self._expected)
        content = json.dumps(body).encode()
        path = self._random.choice(["/generate", "/generate_stream"])
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with raw_connection(self._server.url) as connection:
            sent = head.encode() + content
            connection.sendall(sent if self._random.random() < 0.8 else sent[: self._random.randrange(1, len(sent))])
            time.sleep(self._random.random() * 0.1)

    def misspeak(self) -> None:
        reply = self._server.post("/generate", self._random.choice(MALFORMED))
        assert (reply.status_code, list(reply.json())) == (400, ["error"])

    def hurry(self) -> None:
        """Allow less time than it takes, or just enough."""
        body, text = self._random.choice(self._expected)
        reply = self._server.post("/generate", {**body, "timeout": 0.001 + 0.05 * self._random.random()})
        assert reply.status_code == 504 or (reply.status_code, reply.json()["text"]) == (200, text)

    def count(self) -> None:
        body, _ = self._random.choice(self._expected)
        assert self._server.post("/tokenize", body).json()["fits"] is True


def memory() -> int:
    """Bytes that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_soak(start: Start) -> None:
    server = start(TinyModel, slots=3, queue=64)
    made = bodies()
    expected = [(body, server.post("/generate", body).json()["text"]) for body in made]
    assert len({text for _, text in expected}) > len(made) // 2
    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [Client(server, expected, seed, began + SECONDS) for seed in range(CLIENTS)]
        running = [pool.submit(client.run) for client in clients]
        time.sleep(SECONDS / 2)
        warm = memory()
        done = sum((each.result() for each in running), Counter())
    server.settle(20)
    assert set(done) == {"ask", "stream", "leave", "misspeak", "hurry", "count"}
    # What the allocator keeps varies by some MiB; a picture or a cache row that is kept for each request would be far more.
    assert memory() - warm < 48 * 2**20
    assert threading.active_count() < 60
    for body, text in expected:
        assert server.post("/generate", body).json()["text"] == text
    finished = server.engine.stats().finished
    assert set(finished) <= {"stop", "length", "cancelled", "failed"}
    assert finished["cancelled"] > 0
