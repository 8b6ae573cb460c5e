"""`/generate` and `/generate_stream`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.serving import Running, picture, picture_message


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each `data:` line."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_reply(echo: Running) -> None:
    reply = echo.post("/generate", {"prompt": "hello"})
    body = reply.json()
    assert body["request_id"] == reply.headers["x-request-id"]
    assert (body["model"], body["text"], body["finish_reason"], body["finish_detail"]) == (
        "echo",
        "hello",
        "stop",
        "end_token",
    )
    assert body["usage"] == {"prompt_tokens": 6, "image_tokens": 0, "completion_tokens": 6, "total_tokens": 12}
    assert body["saw"] == []
    assert "logprobs" not in body
    names = (
        "prepare queue window prefill ttft decode sampling finalize total tokens_per_s images_per_s memory batch_size "
        "batch_id drafts_proposed drafts_accepted"
    )
    assert set(body["metrics"]) == set(names.split())
    assert body["metrics"]["batch_size"] == 1
    assert body["metrics"]["memory"] > 0


def test_pictures(tiny: Running) -> None:
    urls = [picture("red", (64, 64)), picture("blue", (128, 64), "WEBP")]
    body = tiny.post("/generate", {"prompt": "read", "images": urls, "max_tokens": 4}).json()
    assert [saw["decoded"] for saw in body["saw"]] == [[64, 64], [128, 64]]
    assert sum(saw["visual_tokens"] for saw in body["saw"]) == body["usage"]["image_tokens"] > 0
    assert (body["finish_reason"], body["finish_detail"]) == ("length", "max_tokens")
    # The same conversation as messages gives the same reply.
    message = picture_message(*urls)
    assert tiny.post("/generate", {"messages": [message], "max_tokens": 4}).json()["text"] == body["text"]


def test_tasks(echo: Running) -> None:
    assert echo.post("/generate", {"task": "caption"}).json()["text"] == "describe"


def test_pictures_alone_are_read(tiny: Running) -> None:
    body = {"images": [picture()], "max_tokens": 4}
    assert tiny.post("/generate", body).json()["text"] == tiny.post("/generate", {**body, "task": "ocr"}).json()["text"]


def test_options(echo: Running) -> None:
    body = {"prompt": "ABCDEF", "stop": ["DE"], "logprobs": 2, "model": "echo", "temperature": 0, "seed": 3}
    reply = echo.post("/generate", body).json()
    assert (reply["text"], reply["finish_detail"]) == ("ABC", "stop_string")
    assert [entry["token"] for entry in reply["logprobs"]][:3] == ["A", "B", "C"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in reply["logprobs"])


@pytest.mark.parametrize("text", ["hello", "\u6f22\u5b57", "\U0001f469\u200d\U0001f467", "a\n\nb\r\ndata: x"])
def test_stream_has_an_event_per_token_and_one_at_the_end(echo: Running, text: str) -> None:
    reply = echo.post("/generate_stream", {"prompt": text})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *tokens, last = events_of(reply.text)
    data = text.encode()
    assert [event["index"] for event in tokens if event["token"]] == [*range(len(data))]
    assert [event["token"]["id"] for event in tokens if event["token"]] == [*data]
    assert "".join(event["text"] for event in tokens) == text == last["text"]
    assert last["done"] is True
    assert last["request_id"] == reply.headers["x-request-id"]
    plain = echo.post("/generate", {"prompt": text}).json()
    assert set(last) == {*plain, "done"}
    same = ("text", "finish_reason", "finish_detail", "usage", "saw", "model")
    assert {name: last[name] for name in same} == {name: plain[name] for name in same}


def test_stream_lets_held_text_go_without_a_token(echo: Running) -> None:
    *tokens, last = events_of(echo.post("/generate_stream", {"prompt": "ABCD", "stop": "CDE"}).text)
    assert "".join(event["text"] for event in tokens) == last["text"] == "ABCD"
