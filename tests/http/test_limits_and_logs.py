"""Priority, the time limit of a request, and what the log says about requests."""

from __future__ import annotations

import io
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import openai
import pytest

from kaminari_http.logs import FIELDS, JsonFormatter
from tests.http.echo_plugin import SlowEcho
from tests.http.serving import Running, Start, chat_body
from tests.http.test_bad_requests import error_of
from tests.http.test_lifecycle import wait_until
from tests.http.test_native import events_of

LONG = "x" * 400  # two seconds of a SlowEcho


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body(LONG, timeout=0.2)),
        ("/v1/completions", {"model": "echo", "prompt": LONG, "timeout": 0.2}),
        ("/v1/responses", {"model": "echo", "input": LONG, "timeout": 0.2}),
        ("/generate", {"prompt": LONG, "timeout": 0.2}),
    ],
)
def test_a_request_that_takes_longer_than_its_timeout(start: Start, path: str, body: dict[str, Any]) -> None:
    server = start(SlowEcho)
    began = time.monotonic()
    reply = server.post(path, body)
    assert 0.2 <= time.monotonic() - began < 1.5
    error = error_of(reply, 504)
    assert (error["type"], error["code"], "0.2 s" in error["message"]) == ("server_error", "timeout", True)
    # Clients would otherwise send it again by themselves.
    assert reply.headers["x-should-retry"] == "false"
    server.settle(1.0)


def test_the_client_does_not_repeat_it(start: Start) -> None:
    server = start(SlowEcho)
    with pytest.raises(openai.APIStatusError) as error:
        server.openai(max_retries=3).chat.completions.create(**chat_body(LONG), extra_body={"timeout": 0.1})
    assert error.value.status_code == 504
    assert 'finish="failed",model="echo"} 1.0' in server.http.get("/metrics").text


def test_timeout_within_a_stream_is_its_last_event(start: Start) -> None:
    *events, last = events_of(start(SlowEcho).chat(LONG, stream=True, timeout=0.2).text)
    assert last["error"]["code"] == "timeout"
    assert 5 < len(events) < 100


@pytest.mark.parametrize("fields", [{"timeout": 30}, {"timeout": None}, {"priority": "batch"}, {"priority": None}])
def test_values_that_are_served(echo: Running, fields: dict[str, Any]) -> None:
    assert echo.chat("hi", **fields).json()["choices"][0]["message"]["content"] == "hi"
    assert echo.post("/generate", {"prompt": "hi", **fields}).json()["text"] == "hi"


@pytest.mark.parametrize(("name", "value"), [("timeout", 0), ("timeout", -1), ("timeout", 1e9), ("priority", "high")])
def test_values_that_are_refused(echo: Running, name: str, value: Any) -> None:
    for path, body in (("/v1/chat/completions", chat_body("hi")), ("/generate", {"prompt": "hi"})):
        assert error_of(echo.post(path, {**body, name: value}))["param"] == name


def test_interactive_requests_go_before_those_of_a_batch(start: Start) -> None:
    server = start(SlowEcho, slots=1)
    ends: list[str] = []

    def ask(name: str, priority: str) -> None:
        assert server.chat(name * 40, priority=priority).status_code == 200
        ends.append(name)

    with ThreadPoolExecutor() as pool:
        pool.submit(ask, "a", "batch")
        while not server.engine.stats().running:
            time.sleep(0.005)
        for name in "bcd":
            pool.submit(ask, name, "batch")
        while server.engine.stats().waiting < 3:
            time.sleep(0.005)
        pool.submit(ask, "i", "interactive")
    assert ends.index("i") < ends.index("d")
    assert ends[0] == "a"


def test_json_lines(start: Start) -> None:
    server = start(SlowEcho)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("kaminari_http")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        server.chat("a secret\n", max_tokens=4)
        server.post("/generate", {"prompt": "a secret"}, headers={"X-Request-Id": "find-me"})
        server.http.get("/no%0Awhere")
        server.chat("a secret", timeout=0.001)
        wait_until(lambda: stream.getvalue().count('"status"') == 4)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert "secret" not in stream.getvalue()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    for line in lines:
        datetime.fromisoformat(line["time"])
        assert {"time", "level", "logger", "message"} <= set(line) <= {"time", "level", "logger", "message", *FIELDS}
        assert line["request_id"]
    [done] = [line for line in lines if line.get("finish") == "end_token"]
    assert (done["request_id"], done["model"], done["prompt_tokens"], done["completion_tokens"]) == (
        "find-me",
        "echo",
        9,
        9,
    )
    [access] = [line for line in lines if line.get("path") == "/generate"]
    assert (access["request_id"], access["method"], access["status"]) == ("find-me", "POST", 200)
    assert [line["status"] for line in lines if line.get("path") == "/no\nwhere"] == [404]
    assert [line["finish"] for line in lines if line.get("status") is None] == ["max_tokens", "end_token", "failed"]


def test_json_line_of_a_crash() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        crash = (type(error), error, error.__traceback__)
        record = logging.LogRecord("x", logging.ERROR, "file", 1, "it %s", ("failed",), crash)
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["message"]) == ("error", "it failed")
    assert line["traceback"].endswith("ValueError: broken")
