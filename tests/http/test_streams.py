"""Server-sent events on the wire: framing, headers, keep-alive, failures after the first byte."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
import torch

from kaminari_core.testing import EchoModel
from kaminari_http import sse
from tests.http.echo_plugin import SlowEcho
from tests.http.serving import Running, Start, chat_body
from tests.http.test_native import events_of


def test_bytes_on_the_wire(echo: Running) -> None:
    reply = echo.chat("hi", stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])


def test_keep_alive_comments_while_nothing_is_said(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class LongPrefill(EchoModel):
        def prefill(self, *arguments: Any) -> torch.Tensor:
            time.sleep(0.5)
            return super().prefill(*arguments)

    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(sse, "FIRST_EVENT_SECONDS", 0.05)
    text = start(LongPrefill).chat("hi", stream=True).text
    before = text[: text.index('"content":"h"')]
    assert before.count(": keep-alive\n\n") >= 3
    assert text.endswith("data: [DONE]\n\n")


class Breaks(EchoModel):
    """Fails at the decode step that would say `!`."""

    def decode(self, step: Any, cache: Any, layer_call: Any) -> torch.Tensor:
        logits = super().decode(step, cache, layer_call)
        if (logits.argmax(-1) == ord("!")).any():
            raise RuntimeError("secret detail")
        return logits


@pytest.fixture
def breaking(start: Start) -> Running:
    return start(Breaks)


def test_failure_after_the_headers_is_the_last_event(breaking: Running) -> None:
    reply = breaking.chat("ab!", stream=True)
    assert reply.status_code == 200
    *events, last = events_of(reply.text)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "ab"
    assert last["error"]["type"] == "server_error"
    assert "[DONE]" not in reply.text
    with pytest.raises(openai.APIError) as error:
        list(breaking.openai().chat.completions.create(**chat_body("ab!"), stream=True))
    assert error.value.body == last["error"]
    breaking.settle()


def test_failure_without_a_stream_is_a_500_and_never_half_a_reply(breaking: Running) -> None:
    for path, body in (("/v1/chat/completions", chat_body("ab!")), ("/generate", {"prompt": "ab!"})):
        reply = breaking.post(path, body)
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
    assert events_of(breaking.post("/generate_stream", {"prompt": "ab!"}).text)[-1]["error"]["type"] == "server_error"
    assert breaking.chat("ab").json()["choices"][0]["message"]["content"] == "ab"


def test_first_token_arrives_before_the_last_is_made(start: Start) -> None:
    server = start(SlowEcho)
    began = time.monotonic()
    stream = server.openai().chat.completions.create(**chat_body("x" * 100), stream=True)
    times = [time.monotonic() - began for chunk in stream if chunk.choices[0].delta.content]
    assert len(times) == 100
    # 99 steps of 5 ms lie between the first and the last.
    assert times[-1] - times[0] > 0.3
