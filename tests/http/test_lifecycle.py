"""Clients that leave, queues that fill, neighbours that fail, engines that close: what is left is always nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
import torch

from kaminari_core.flow import Embedded, Prepared
from kaminari_core.protocols import Waiting
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.testing import EchoModel
from kaminari_http.app import loading_app
from kaminari_http.config import AppConfig
from kaminari_http.server import Server, listen
from tests.http.echo_plugin import SlowEcho
from tests.http.serving import Running, Start, chat_body, picture, picture_message, raw_connection

LONG = "x" * 400  # two seconds of a SlowEcho


def wait_until(condition: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/generate_stream", "stream"])
def test_client_that_leaves_frees_its_slot(start: Start, path: str) -> None:
    server = start(SlowEcho, slots=2)
    body = {"prompt": LONG} if path.startswith("/generate") else chat_body(LONG, stream=path == "stream", n=2)
    content = json.dumps(body).encode()
    with raw_connection(server.url) as client:
        target = "/v1/chat/completions" if path == "stream" else path
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        wait_until(lambda: server.engine.stats().running == body.get("n", 1))
        time.sleep(0.05)
    left = time.monotonic()
    server.settle(1.0)
    assert time.monotonic() - left < 1.0
    assert server.engine.stats().finished == {"cancelled": body.get("n", 1)}
    # The next request is served as if nothing had been.
    assert server.chat("next").json()["choices"][0]["message"]["content"] == "next"
    assert f'finish="cancelled",model="echo"}} {body.get("n", 1)}.0' in server.http.get("/metrics").text


def test_client_that_leaves_after_two_chunks(start: Start) -> None:
    server = start(SlowEcho)
    stream = server.openai().chat.completions.create(**chat_body(LONG), stream=True)
    next(stream), next(stream)
    stream.close()
    server.settle(1.0)
    assert server.engine.stats().finished == {"cancelled": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_it_waits_in_the_queue(start: Start, stream: bool) -> None:
    server = start(SlowEcho, slots=1, max_length=20_000, max_tokens=10_000)
    running = server.openai().chat.completions.create(**chat_body("y" * 9000, max_tokens=9000), stream=True)
    next(running)
    with pytest.raises(httpx2.TimeoutException):
        server.post("/v1/chat/completions", chat_body("never", stream=stream), timeout=0.1)
    wait_until(lambda: server.engine.stats().finished.get("cancelled") == 1)
    assert server.engine.stats().running == 1
    running.close()
    server.settle()


def test_client_that_leaves_while_it_sends(echo: Running) -> None:
    with raw_connection(echo.url) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"
        )
    assert echo.http.get("/health").status_code == 200
    echo.settle()


@pytest.mark.parametrize("stream", [False, True])
def test_bounded_queue(start: Start, stream: bool) -> None:
    gate = threading.Event()

    class Gated(EchoModel):
        def prefill(self, *arguments: Any) -> torch.Tensor:
            assert gate.wait(20)
            return super().prefill(*arguments)

    server = start(Gated, slots=1, queue=3)
    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(server.chat, "first", stream=stream)]
        wait_until(lambda: server.engine.stats().running == 1)
        waiting += [pool.submit(server.chat, "more", stream=stream) for _ in range(19)]
        # One runs and three wait; the others are refused while nothing moves.
        wait_until(lambda: sum(future.done() for future in waiting) == 16)
        gate.set()
        replies = [future.result() for future in waiting]
    assert sorted(reply.status_code for reply in replies) == [200] * 4 + [429] * 16
    for reply in replies:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert (reply.json()["error"]["type"], reply.json()["error"]["code"]) == ("rate_limit_error", "queue_full")
    server.settle()
    assert server.chat("after").status_code == 200


def test_ten_times_what_can_wait(start: Start) -> None:
    server = start(SlowEcho, slots=2, queue=4)
    texts = [f"number {index:012}" for index in range(60)]

    def ask(text: str) -> tuple[float, httpx2.Response]:
        began = time.monotonic()
        reply = server.chat(text)
        return time.monotonic() - began, reply

    with ThreadPoolExecutor(60) as pool:
        replies = list(pool.map(ask, texts))
    assert {reply.status_code for _, reply in replies} == {200, 429}
    served = [(text, seconds, reply) for text, (seconds, reply) in zip(texts, replies, strict=True) if reply.is_success]
    assert len(served) >= 6
    assert all(reply.json()["choices"][0]["message"]["content"] == text for text, _, reply in served)
    # At most three rounds of 20 steps are waited for, 0.1 s each, however many ask.
    assert max(seconds for _, seconds, _ in served) < 5
    server.settle()


def test_choices_are_all_queued_or_none(start: Start) -> None:
    server = start(SlowEcho, slots=1, queue=2)
    assert server.chat("hi", n=8).status_code == 429
    server.settle()
    assert server.chat("hi").status_code == 200


class FailsInPrefill(EchoModel):
    def embed(self, prepared: Prepared) -> Embedded:
        if ord("!") in prepared.tokens:
            raise RuntimeError("the tower fell")
        return super().embed(prepared)


class FailsInPrepare(EchoModel):
    def prepare(self, request: Any) -> Prepared:
        prepared = super().prepare(request)
        if ord("!") in prepared.tokens:
            raise RuntimeError("no such picture")
        return prepared


@pytest.mark.parametrize("kind", [FailsInPrefill, FailsInPrepare])
@pytest.mark.parametrize("stream", [False, True])
def test_one_that_fails_harms_no_neighbour(start: Start, kind: type[EchoModel], stream: bool) -> None:
    server = start(kind)
    texts = [f"good {index}" for index in range(7)]
    with ThreadPoolExecutor(8) as pool:
        bad = pool.submit(server.chat, "bad!", stream=stream)
        good = list(pool.map(server.chat, texts))
    assert [reply.json()["choices"][0]["message"]["content"] for reply in good] == texts
    # Before the first byte of a stream a failure still has a status of its own.
    assert bad.result().status_code == 500
    assert bad.result().json()["error"]["type"] == "server_error"
    server.settle()


def test_concurrent_pictures_never_mix(tiny: Running) -> None:
    colors = ["red", "green", "blue", "white", "black", "yellow", "orange", "gray"]
    bodies = [
        {
            "model": "tiny",
            "messages": [picture_message(picture(color, (32 + 32 * index, 96)), text=f"read {color}")],
            "max_tokens": 6 + 2 * index,
        }
        for index, color in enumerate(colors)
    ]

    def ask(body: dict[str, Any]) -> str:
        reply = tiny.post("/v1/chat/completions", body).json()
        text: str = reply["choices"][0]["message"]["content"]
        return text

    alone = [ask(body) for body in bodies]
    assert len(set(alone)) == 8
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(ask, bodies)) == alone
    tiny.settle()


def test_many_requests_with_all_outcomes_leave_nothing(start: Start) -> None:
    server = start(FailsInPrefill, slots=3)

    def one(index: int) -> int:
        body = chat_body("ok" if index % 3 else "bad!", stream=index % 2 == 0, max_tokens=1 + index % 4)
        return server.post("/v1/chat/completions", body if index % 7 else {"model": "echo"}).status_code

    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(one, range(120)))
    assert set(statuses) == {200, 400, 500}
    server.settle()


@pytest.mark.parametrize("stream", [False, True])
def test_closing_engine_ends_requests_with_an_error(start: Start, stream: bool) -> None:
    server = start(SlowEcho)
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(server.chat, LONG, stream=stream)
        wait_until(lambda: server.engine.stats().generated_tokens > 3)
        server.engine.close()
        answer = reply.result()
    if stream:
        assert '"code":"engine_closed"' in answer.text.splitlines()[-2]
        assert "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_closed")
    assert server.chat("more").status_code == 503
    # Another model's engine would go on; this name is still listed, and its state is what /health is for.
    assert server.http.get("/v1/models").status_code == 200
    health = server.http.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "unhealthy")


def test_draining_finishes_what_runs_and_takes_nothing_more(start: Start) -> None:
    server = start(SlowEcho)
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(server.chat, "w" * 100, stream=True)
        wait_until(lambda: server.engine.stats().running == 1)
        server.app.state.service.unavailable = "The server is shutting down."
        closing = threading.Thread(target=server.engine.close, args=(10.0,))
        closing.start()
        assert server.chat("late").status_code == 503
        assert server.http.get("/health").status_code == 503
        assert reply.result().text.endswith("data: [DONE]\n\n")
        closing.join()


class Superstitious(ContinuousScheduler):
    """Takes the engine thread down with it when it sees a prompt of 13 tokens."""

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str]:
        if any(request.prompt_tokens == 13 for request in waiting):
            raise RuntimeError("thirteen")
        return super().admit(waiting, free, running, now)


def test_dead_engine_ends_all_requests_and_shows_in_health(start: Start) -> None:
    server = start(SlowEcho, scheduler=Superstitious)
    with ThreadPoolExecutor() as pool:
        streamed = pool.submit(server.chat, LONG, stream=True)
        plain = pool.submit(server.chat, LONG)
        # Both prompts are in, so both have their first token.
        wait_until(lambda: server.engine.stats().prompt_tokens == 2 * (len(LONG) + 1))
        killer = server.chat("x" * 12)
        assert (killer.status_code, plain.result().status_code) == (500, 500)
        assert '"type":"server_error"' in streamed.result().text.splitlines()[-2]
    assert server.http.get("/health").status_code == 503
    assert server.chat("hello").status_code == 503
    assert server.http.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("path", "closed"), [("/health", 503), ("/health/ready", 503), ("/health/live", 200), ("/health/decode", 503)]
)
def test_health_paths(start: Start, path: str, closed: int) -> None:
    server = start(EchoModel, app={"api_keys": ("k",)})
    assert (server.http.get(path).status_code, server.http.get(path).json()["status"]) == (200, "ok")
    server.engine.close()
    assert server.http.get(path).status_code == closed


def test_decode_is_probed_only_when_no_step_ran_lately(start: Start) -> None:
    server = start(EchoModel)
    # Nothing was decoded yet, so a step is run for the answer.
    assert server.http.get("/health/decode").json() == {"status": "ok", "seconds_since_step": {"echo": 0.0}}
    steps = server.engine.stats().steps
    server.chat("hi")
    assert server.engine.stats().steps > steps
    steps = server.engine.stats().steps
    assert 0 < server.http.get("/health/decode").json()["seconds_since_step"]["echo"] < 10
    assert server.engine.stats().steps == steps


def test_steps_that_fail_show_in_health(start: Start) -> None:
    class Broken(EchoModel):
        def decode(self, *arguments: Any) -> torch.Tensor:
            raise RuntimeError("no kernel image")

    server = start(Broken)
    error = server.http.get("/health/decode")
    assert (error.status_code, error.json()["error"]["code"]) == (503, "engine_unhealthy")
    assert "'echo' does not decode" in error.json()["error"]["message"]
    for _ in range(3):
        assert server.chat("hi").status_code in (500, 503)
    # The circuit is open: refused at once, with the reason, and readiness is red.
    refused = server.chat("hi")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unhealthy")
    assert refused.headers["retry-after"]
    assert server.http.get("/health").status_code == 503
    assert "no kernel image" in server.http.get("/health/ready").json()["error"]["message"]
    assert server.http.get("/health/live").status_code == 200


def test_loading_server_is_unhealthy_and_says_why() -> None:
    app = loading_app(AppConfig(api_keys=("k",)))
    with listen("127.0.0.1", 0) as listener, Server(app, listener) as server:
        health = httpx2.get(f"{server.url}/health")
        assert (health.status_code, health.json()["error"]["message"]) == (503, "The model is still loading.")
        assert httpx2.post(f"{server.url}/v1/chat/completions", json=chat_body("x")).status_code == 401
        # The page is there already, and shows what the other answers say.
        assert httpx2.get(server.url).headers["content-type"].startswith("text/html")
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        keyed = httpx2.post(
            f"{server.url}/v1/chat/completions", json=chat_body("x"), headers={"Authorization": "Bearer k"}
        )
        assert (keyed.status_code, keyed.json()["error"]["code"]) == (503, "loading")
        assert keyed.headers["retry-after"]
