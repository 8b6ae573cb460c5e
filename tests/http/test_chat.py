"""Chat completions through the openai client, plain and streamed, in the shapes that it and others expect."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from kaminari_core.testing import EchoModel, TinyModel
from tests.http.serving import Running, Start, chat_body, open_engine, picture, picture_message, running

USER = [{"role": "user", "content": "hello"}]


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_plain_reply(echo: Running) -> None:
    reply = echo.openai().chat.completions.create(model="echo", messages=USER)
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.model) == ("chat.completion", "echo")
    [choice] = reply.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "hello")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    # The prompt is the script: five bytes and the end token; the end token is generated as well.
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 6, 12)
    assert usage.prompt_tokens_details.model_extra == {"image_tokens": 0} or (
        usage.prompt_tokens_details.image_tokens == 0
    )


def test_exact_fields_of_a_reply(echo: Running) -> None:
    reply = echo.chat("hi").json()
    assert set(reply) == {"id", "object", "created", "model", "choices", "usage", "kaminari"}
    assert set(reply["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert set(reply["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}


def test_what_kaminari_adds(tiny: Running) -> None:
    body = {"model": "tiny", "max_tokens": 3, "messages": [picture_message(picture(size=(96, 64)))]}
    reply = tiny.post("/v1/chat/completions", body).json()
    [saw] = reply["kaminari"]["saw"]
    assert (saw["decoded"], saw["format"], saw["rotation"]) == ([96, 64], "PNG", "none")
    assert (
        saw["visual_tokens"]
        == saw["grid"][0] * saw["grid"][1]
        == reply["usage"]["prompt_tokens_details"]["image_tokens"]
    )
    [choice] = reply["kaminari"]["choices"]
    assert (choice["index"], choice["finish_detail"], choice["batch_size"]) == (0, "max_tokens", 1)
    assert choice["timings"]["total"] >= choice["timings"]["ttft"] > 0


def test_async_client(echo: Running) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
            waiting = (client.chat.completions.create(**chat_body(f"number {n}")) for n in range(6))
            replies = await asyncio.gather(*waiting)
            stream = await client.chat.completions.create(**chat_body("streamed"), stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return [*(reply.choices[0].message.content for reply in replies), streamed]

    assert asyncio.run(ask()) == [*(f"number {n}" for n in range(6)), "streamed"]


def test_streamed_chunks(echo: Running) -> None:
    chunks = list(echo.openai().chat.completions.create(model="echo", messages=USER, stream=True))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    first, *middle, last = (chunk.choices[0] for chunk in chunks)
    assert first.delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": ""}
    assert [choice.delta.model_dump(exclude_unset=True) for choice in middle] == [{"content": byte} for byte in "hello"]
    assert last.delta.model_dump(exclude_unset=True) == {}
    assert [choice.finish_reason for choice in (first, *middle)] == [None] * 6
    assert last.finish_reason == "stop"
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["kaminari"]["choices"][0]["finish_detail"] == "end_token"


def test_streaming_helper_of_the_client(echo: Running) -> None:
    body = chat_body("hello", n=2, stream_options={"include_usage": True})
    with echo.openai().chat.completions.stream(**body) as stream:
        reply = stream.get_final_completion()
    assert [choice.message.content for choice in reply.choices] == ["hello", "hello"]
    assert reply.usage.completion_tokens == 12


def test_family_emoji_and_combining_letters_stream_whole(echo: Running) -> None:
    text = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL} d\N{COMBINING CARON} \u6f22"
    chunks = list(echo.openai().chat.completions.create(**chat_body(text), stream=True))
    assert text_of(chunks) == text
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks)


@pytest.mark.parametrize("stop", [None, "FGH", ["zzz", "E"], "Iq"])
@pytest.mark.parametrize("max_tokens", [None, 1, 4, 100])
def test_stream_equals_plain(echo: Running, stop: str | list[str] | None, max_tokens: int | None) -> None:
    body = chat_body("ABCDEFGHI", stop=stop, max_tokens=max_tokens, logprobs=True, top_logprobs=2)
    plain = echo.openai().chat.completions.create(**body)
    chunks = list(echo.openai().chat.completions.create(**body, stream=True))
    assert text_of(chunks) == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == plain.choices[0].logprobs.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("max_tokens", "reason"), [(4, "length"), (5, "length"), (6, "stop")])
def test_finish_reason(echo: Running, stream: bool, max_tokens: int, reason: str) -> None:
    reply = echo.openai().chat.completions.create(**chat_body("hello", max_tokens=max_tokens), stream=stream)
    if stream:
        *_, last = reply
        assert last.choices[0].finish_reason == reason
    else:
        assert reply.choices[0].finish_reason == reason
        assert reply.choices[0].message.content == "hello"[:max_tokens]


def test_stop_string_over_several_tokens_sends_nothing_of_it(echo: Running) -> None:
    body = chat_body("ABCDEFGHIJKL", stop="DEFGHIJ")
    chunks = list(echo.openai().chat.completions.create(**body, stream=True))
    assert text_of(chunks) == "ABC"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert echo.openai().chat.completions.create(**body).choices[0].message.content == "ABC"


def test_text_held_for_a_stop_string_is_sent_at_the_end(echo: Running) -> None:
    chunks = list(echo.openai().chat.completions.create(**chat_body("ABCDE", stop="DEX"), stream=True))
    assert text_of(chunks) == "ABCDE"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_in_a_stream_unless_asked(echo: Running, options: Any) -> None:
    lines = echo.chat("hi", stream=True, stream_options=options).text.splitlines()
    assert not any('"usage"' in line for line in lines)
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"


def test_usage_in_a_stream(echo: Running) -> None:
    body = chat_body("hello", stream=True, stream_options={"include_usage": True})
    *chunks, last = echo.openai().chat.completions.create(**body)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (6, 6, 12)


def test_logprobs(echo: Running) -> None:
    reply = echo.openai().chat.completions.create(**chat_body("\u6f22", logprobs=True, top_logprobs=3))
    entries = reply.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes) == "\u6f22".encode()
    for entry in entries:
        assert [len(entry.top_logprobs), entry.logprob] == [3, entry.top_logprobs[0].logprob]
        assert entry.top_logprobs[0].bytes == entry.bytes
        assert entry.logprob <= 0


def test_logprobs_without_alternatives(echo: Running) -> None:
    entries = echo.chat("ab", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"], entry["top_logprobs"]) for entry in entries] == [
        ("a", [97], []),
        ("b", [98], []),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(tiny: Running, stream: bool) -> None:
    body = {"model": "tiny", "messages": USER, "n": 3, "temperature": 1, "seed": 7, "max_tokens": 12}
    client = tiny.openai()

    def texts(**changes: Any) -> dict[int, str]:
        reply = client.chat.completions.create(**{**body, **changes}, stream=stream)
        if not stream:
            return {choice.index: choice.message.content for choice in reply.choices}
        found: dict[int, str] = {}
        for chunk in reply:
            for choice in chunk.choices:
                found[choice.index] = found.get(choice.index, "") + (choice.delta.content or "")
        return found

    first = texts()
    assert sorted(first) == [0, 1, 2]
    assert len(set(first.values())) == 3
    assert texts() == first
    # Each choice is what its own seed gives alone.
    assert [texts(n=1, seed=7 + index)[0] for index in range(3)] == [first[index] for index in range(3)]


def test_usage_of_several_choices(echo: Running) -> None:
    usage = echo.chat("hello", n=3).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 18, 24)


def test_default_is_greedy_and_temperature_without_a_seed_varies(tiny: Running) -> None:
    def texts(**fields: Any) -> set[str]:
        body = {"model": "tiny", "messages": USER, "max_tokens": 16, **fields}
        return {tiny.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] for _ in range(4)}

    assert len(texts()) == 1
    assert texts(temperature=0) == texts()
    assert len(texts(temperature=1)) > 1
    assert len(texts(temperature=1, seed=-5)) == 1


def test_a_seed_holds_beside_others_without_one(tiny: Running) -> None:
    def text(**fields: Any) -> str:
        body = {"model": "tiny", "messages": USER, "max_tokens": 24, "temperature": 1, **fields}
        found: str = tiny.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        return found

    alone = text(seed=11)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            others = [pool.submit(text) for _ in range(3)]
            assert pool.submit(text, seed=11).result() == alone
            assert any(other.result() != alone for other in others)


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_tokens": 2}, 2),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 2}, 2),
        ({"max_tokens": None}, 5),
        ({"max_tokens": None, "max_completion_tokens": None}, 5),
    ],
)
def test_token_limits(echo: Running, fields: dict[str, Any], length: int) -> None:
    assert len(echo.chat("hello", **fields).json()["choices"][0]["message"]["content"]) == length


def test_logit_bias(echo: Running) -> None:
    # Token ids of this model are bytes: 'l' is banned, so the runner-up is said in its place.
    text = echo.chat("hello", logit_bias={str(ord("l")): -100}, max_tokens=5).json()["choices"][0]["message"]["content"]
    assert len(text) == 5
    assert "l" not in text


def test_ignore_eos_goes_on_past_the_end(echo: Running) -> None:
    reply = echo.chat("hi", ignore_eos=True, max_tokens=9).json()
    assert reply["usage"]["completion_tokens"] == 9
    assert reply["choices"][0]["finish_reason"] == "length"


def test_pictures_that_overflow_the_context_are_not_cut(start: Start) -> None:
    server = start(TinyModel, max_length=100)
    body = {"model": "echo", "messages": [picture_message(*[picture(size=(192, 192))] * 3)], "max_tokens": 4}
    for stream in (False, True):
        error = server.post("/v1/chat/completions", {**body, "stream": stream})
        assert (error.status_code, error.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert server.post("/v1/chat/completions", {**body, "messages": [picture_message(picture())]}).status_code == 200


def test_too_many_pictures(start: Start) -> None:
    server = start(TinyModel, max_images=2)
    error = server.post("/generate", {"prompt": "x", "images": [picture()] * 3}).json()["error"]
    assert (error["code"], error["param"]) == ("too_many_images", "images[2]")


def test_names_with_slashes() -> None:
    with running(open_engine(EchoModel), name="owner/model-2B") as server:
        assert server.openai().models.retrieve("owner/model-2B").id == "owner/model-2B"
        assert server.chat("hi", model="owner/model-2B").json()["model"] == "owner/model-2B"


def test_models(echo: Running) -> None:
    [model] = echo.openai().models.list()
    assert (model.id, model.object, model.owned_by) == ("echo", "model", "kaminari")
    assert echo.openai().models.retrieve("echo") == model
    # The first id is usable as it is.
    assert echo.openai().chat.completions.create(model=model.id, messages=USER).choices[0].message.content == "hello"


def test_errors_of_the_client(echo: Running) -> None:
    client = echo.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=USER)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert "echo" in missing.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="echo", messages=USER, temperature=9)
    assert (bad.value.type, bad.value.param) == ("invalid_request_error", "temperature")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_its_status_also_in_a_stream(echo: Running, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        echo.openai().chat.completions.create(**chat_body("x" * 600), stream=stream)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    assert "601" in error.value.message
    assert "512" in error.value.message


def test_a_prompt_that_just_fits(echo: Running) -> None:
    assert echo.chat("x" * 511).status_code == 200
    assert echo.chat("x" * 512).status_code == 400


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_before_the_user(echo: Running, role: str) -> None:
    body = {"model": "echo", "messages": [{"role": role, "content": "be brief"}, *USER]}
    assert echo.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "hello"


def test_history_with_empty_and_absent_assistant_content(echo: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "two"},
        {"role": "user", "content": "two again"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": "three"},
    ]
    reply = echo.post("/v1/chat/completions", {"model": "echo", "messages": history})
    assert reply.json()["choices"][0]["message"]["content"] == "three"


@pytest.mark.parametrize("form", ["object", "string"])
def test_picture_in_both_forms(tiny: Running, form: str) -> None:
    url: Any = picture() if form == "string" else {"url": picture(), "detail": "high"}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "x"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    reply = tiny.post("/v1/chat/completions", body).json()
    assert reply["usage"]["prompt_tokens_details"]["image_tokens"] == 4


def test_declared_type_is_not_believed(tiny: Running) -> None:
    data = picture().partition(",")[2]
    for url in (
        f"data:image/jpeg;base64,{data}",
        f"DATA:image/x-png;charset=utf-8;BASE64,{data}",
        f"data:;base64,{data}",
    ):
        body = {"model": "tiny", "messages": [picture_message(url)], "max_tokens": 1}
        assert tiny.post("/v1/chat/completions", body).status_code == 200, url


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/x.png",
        "https://example.org/x.png",
        "file:///etc/hostname",
        "/etc/hostname",
        base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(80)).decode(),
        "data:image/png;base64,****",
        "data:image/png;base64,",
        "data:image/png",
        "data:text/plain;base64,aGVsbG8=",
        "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>",
        "",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_picture_is_refused_by_place(tiny: Running, url: str, stream: bool) -> None:
    message = picture_message(picture(), url)
    reply = tiny.post("/v1/chat/completions", {"model": "tiny", "messages": [message], "stream": stream})
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["param"] == "messages[0].content[1]"
    tiny.settle()
