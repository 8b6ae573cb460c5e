"""The whole way with the real model package: checkpoint files, chat template, pictures, engine, HTTP, openai client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kaminari_core.config import EngineConfig
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from scripts.make_random_checkpoint import make_checkpoint
from tests.http.serving import Running, picture, picture_message, running

USER = {"role": "user", "content": "one"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make_checkpoint(tmp_path_factory.mktemp("random") / "tiny", "tiny")
    config = EngineConfig(device="cpu", dtype="float32", compile=False, slots=4, max_length=256, visual_tokens=64)
    registry = load_registry(only=frozenset({"core", "qwen3vl", "http"}))
    engine = open_engine(registry, "qwen3vl", str(folder), config, silent)
    with running(engine, name=engine.name) as server:
        yield server


def ask(server: Running, *messages: Any, **fields: Any) -> Any:
    body = {"model": "qwen3vl", "messages": list(messages), "max_tokens": 8, **fields}
    return server.post("/v1/chat/completions", body)


def test_stream_equals_plain_and_generate(qwen: Running) -> None:
    message = picture_message(picture("navy", (160, 96)), picture("red", (64, 64)))
    plain = ask(qwen, message, max_tokens=24).json()
    body: dict[str, Any] = {"model": "qwen3vl", "messages": [message], "max_tokens": 24, "stream": True}
    chunks = qwen.openai().chat.completions.create(**body)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain["choices"][0]["message"]["content"]
    )
    native = qwen.post("/generate", {"messages": [message], "max_tokens": 24}).json()
    assert native["text"] == plain["choices"][0]["message"]["content"]
    saw = plain["kaminari"]["saw"]
    assert [each["decoded"] for each in saw] == [[160, 96], [64, 64]]
    tokens = sum(each["grid"][0] * each["grid"][1] for each in saw)
    assert native["usage"]["image_tokens"] == plain["usage"]["prompt_tokens_details"]["image_tokens"] == tokens


def test_tasks_of_the_model(qwen: Running) -> None:
    images = [picture()]
    for task in ("ocr", "caption", "markdown"):
        reply = qwen.post("/generate", {"task": task, "images": images, "max_tokens": 3}).json()
        assert reply["usage"]["image_tokens"] == reply["saw"][0]["visual_tokens"] > 0, task


@pytest.mark.parametrize(
    "messages",
    [
        [USER, USER],
        [{"role": "system", "content": "brief"}, USER],
        [{"role": "developer", "content": "brief"}, USER],
        [USER, {"role": "assistant", "content": ""}, USER],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "42"}, USER],
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "two"}]}, picture_message(picture())],
        [picture_message(picture()), {"role": "assistant", "content": "two"}, USER],
        [{"role": "user", "content": [{"type": "image_url", "image_url": picture()}]}],
        [{"role": "user", "content": "<|image_pad|><|im_end|><|vision_start|>"}],
    ],
    ids=[
        "two users", "system", "developer", "empty assistant", "tool call", "parts of assistant", "picture in history",
        "picture alone", "special tokens as text",
    ],
)  # fmt: skip
def test_conversations_that_are_served(qwen: Running, messages: list[Any]) -> None:
    reply = ask(qwen, *messages)
    assert reply.status_code == 200, reply.text
    assert 1 <= reply.json()["usage"]["completion_tokens"] <= 8


def test_turn_without_words_is_refused_by_place(qwen: Running) -> None:
    reply = ask(qwen, USER, {"role": "assistant", "content": "two"}, {"role": "user", "content": ""})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[2].content")


def test_prompt_up_to_the_limit(qwen: Running) -> None:
    first = ask(qwen, {"role": "user", "content": "a"}, max_tokens=1).json()["usage"]["prompt_tokens"]
    # One more letter with a space is one more token or two; find the longest prompt that is taken.
    longest = 0
    for words in range(100, 260):
        reply = ask(qwen, {"role": "user", "content": "a " * words}, max_tokens=1)
        if reply.status_code == 400:
            assert reply.json()["error"]["code"] == "context_length_exceeded"
            break
        longest = reply.json()["usage"]["prompt_tokens"]
    assert first < 255 <= longest <= 256


def test_pictures_do_not_mix(qwen: Running) -> None:
    messages = [picture_message(picture((40 * n, 250 - 30 * n, 17 * n), (64 + 32 * n, 64))) for n in range(6)]

    def text(message: Any) -> str:
        found: str = ask(qwen, message, max_tokens=10).json()["choices"][0]["message"]["content"]
        return found

    alone = [text(message) for message in messages]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            assert list(pool.map(text, messages)) == alone
    qwen.settle()
