"""`/v1/responses` through the openai client: stateless, with the documented events."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from kaminari_core.testing import EchoModel
from tests.http.serving import Running, Start, picture
from tests.http.test_bad_requests import error_of
from tests.http.test_native import events_of


def create(server: Running, given: Any, model: str = "echo", **fields: Any) -> Any:
    return server.openai().responses.create(model=model, input=given, **fields)


def test_plain_reply(echo: Running) -> None:
    reply = create(echo, "hello", metadata={"a": "b"})
    assert (reply.output_text, reply.status, reply.error, reply.incomplete_details) == (
        "hello",
        "completed",
        None,
        None,
    )
    assert (reply.object, reply.model, reply.metadata) == ("response", "echo", {"a": "b"})
    assert reply.id.startswith("resp_")
    [message] = reply.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (6, 6, 12)
    assert reply.store is False


def test_a_reply_that_is_cut_is_incomplete(echo: Running) -> None:
    reply = create(echo, "hello", max_output_tokens=2)
    assert (reply.output_text, reply.status, reply.incomplete_details.reason) == (
        "he", "incomplete", "max_output_tokens",
    )  # fmt: skip


def test_items_parts_and_instructions(start: Start) -> None:
    """The model says its whole conversation, which shows what became of the items."""

    def script(request: Any) -> list[int]:
        turns = [f"{message.role}: {''.join(part.text for part in message.parts)}" for message in request.messages]
        return [*"|".join(turns).encode(), 256]

    server = start(lambda config: EchoModel(config, script))
    first = create(server, [{"role": "user", "content": "one"}])
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "message", "role": "user", "content": "one"},
        # A reply goes back into the conversation as it came.
        first.output[0].model_dump(exclude_unset=True),
        {"role": "user", "content": [{"type": "input_text", "text": "two "}, {"type": "input_text", "text": "three"}]},
    ]
    turns = "user: one|assistant: user: one|user: two three"
    assert create(server, items).output_text == f"developer: be brief|{turns}"
    assert create(server, items, instructions="say yes").output_text == f"system: say yes\n\nbe brief|{turns}"
    assert create(server, items[1:], instructions="say yes").output_text == f"system: say yes|{turns}"


def test_pictures(tiny: Running) -> None:
    parts = [
        {"type": "input_image", "image_url": picture(size=(96, 64)), "detail": "auto"},
        {"type": "input_text", "text": "read"},
    ]
    reply = create(tiny, [{"role": "user", "content": parts}], "tiny", max_output_tokens=8)
    [saw] = reply.model_extra["kaminari"]["saw"]
    assert saw["decoded"] == [96, 64]
    native = tiny.post("/generate", {"prompt": "read", "images": [picture(size=(96, 64))], "max_tokens": 8}).json()
    assert reply.output_text == native["text"]
    assert reply.usage.input_tokens_details.model_extra == {"image_tokens": saw["visual_tokens"]}


def test_stream(echo: Running) -> None:
    text = "d\N{COMBINING CARON} \u6f22!"
    plain = create(echo, text)
    events = list(create(echo, text, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event.delta for event in events[4:-4]) == plain.output_text == text
    assert events[-4].text == text
    assert events[-1].response.output == events[-1].response.output
    assert events[-1].response.output_text == text
    assert events[-1].response.usage == plain.usage
    assert {event.item_id for event in events[3:-2]} == {events[-1].response.output[0].id}


def test_named_events_on_the_wire(echo: Running) -> None:
    body = echo.post("/v1/responses", {"model": "echo", "input": "hi", "stream": True, "max_output_tokens": 1}).text
    assert body.startswith('event: response.created\ndata: {"type":"response.created","sequence_number":0,')
    assert body.split("\n\n")[-2].startswith("event: response.incomplete\n")
    assert "[DONE]" not in body


def test_streaming_helper_of_the_client(echo: Running) -> None:
    with echo.openai().responses.stream(model="echo", input="hello") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        reply = stream.get_final_response()
    assert ("".join(deltas), reply.output_text) == ("hello", "hello")


def test_async_client(echo: Running) -> None:
    async def ask() -> str:
        async with AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model="echo", input="later", stream=True)
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    assert asyncio.run(ask()) == "later"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(echo: Running, stream: bool) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    reply = create(echo, "ab", **fields)
    response = list(reply)[-1].response if stream else reply
    entries = response.output[0].content[0].logprobs
    assert [(entry.token, entry.bytes, len(entry.top_logprobs)) for entry in entries] == [
        ("a", [97], 2),
        ("b", [98], 2),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"store": True}, "store", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", None),
        ({"text": {"verbosity": "low"}}, "text.verbosity", None),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"input": None}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ""}, "input", None),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input", None),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", None),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", None),
        ({"input": [{"type": "reasoning", "role": "user", "content": "x"}]}, "input[0].type", None),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "input[0].content[0].type", None),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
    ],
    ids=str,
)  # fmt: skip
def test_the_field_at_fault_is_named(
    echo: Running, fields: dict[str, Any], param: str, code: str | None, stream: bool
) -> None:
    error = error_of(echo.post("/v1/responses", {"model": "echo", "input": "hi", "stream": stream, **fields}))
    assert (error["param"], error["code"]) == (param, code)


def test_place_of_a_bad_picture(tiny: Running) -> None:
    item = {
        "role": "user",
        "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "/etc/passwd"}],
    }
    error = error_of(tiny.post("/v1/responses", {"model": "tiny", "input": [item]}))
    assert error["param"] == "input[0].content[1]"


def test_failure_in_the_stream_is_raised_by_the_client(start: Start) -> None:
    from tests.http.test_streams import Breaks

    server = start(Breaks)
    last = events_of(server.post("/v1/responses", {"model": "echo", "input": "ab!", "stream": True}).text)[-1]
    assert last["error"]["type"] == "server_error"
    with pytest.raises(openai.APIError):
        list(create(server, "ab!", stream=True))
    server.settle()
