"""Structured output over HTTP, with OpenAI's own client and with the fields that vLLM's users send."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import re
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, Field

from tests.http.serving import Running, chat_body, picture, picture_message
from tests.http.test_bad_requests import error_of
from tests.http.test_native import events_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shop": {"type": "string", "maxLength": 8},
        "total": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["shop", "total"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "receipt", "schema": SCHEMA, "strict": True}}
FLAT: dict[str, Any] = {"type": "json_schema", "name": "receipt", "schema": SCHEMA, "strict": True}
DOCUMENT = '{"shop": "Lido", "total": 12}'
DIGITS = "[0-9]{4}"


class Receipt(BaseModel):
    """What clients ask for by its class."""

    shop: str = Field(max_length=8)
    total: int = Field(ge=0, le=99)
    paid: bool


def valid(text: str | None) -> bool:
    jsonschema.validate(json.loads(text or ""), SCHEMA)
    return True


def test_chat_with_a_schema_and_a_picture(tiny: Running) -> None:
    messages: Any = [picture_message(picture())]
    client: Any = tiny.openai()
    reply = client.chat.completions.create(model="tiny", messages=messages, response_format=FORMAT, n=2)
    for choice, report in zip(reply.choices, reply.kaminari["choices"], strict=True):
        assert valid(choice.message.content)
        assert (choice.finish_reason, report["complete"]) == ("stop", True)
        assert report["finish_detail"] == "structure_complete"


def test_the_client_parses_replies_into_pydantic_models(tiny: Running) -> None:
    messages: Any = [{"role": "user", "content": "read"}]
    client: Any = tiny.openai()
    chat = client.beta.chat.completions.parse(model="tiny", messages=messages, response_format=Receipt)
    assert isinstance(chat.choices[0].message.parsed, Receipt)
    response = client.responses.parse(model="tiny", input="read", text_format=Receipt)
    assert isinstance(response.output_parsed, Receipt)


def test_a_stream_is_the_document_piece_by_piece(echo: Running) -> None:
    messages: Any = [{"role": "user", "content": DOCUMENT}]
    client: Any = echo.openai()
    stream = client.chat.completions.create(
        model="echo",
        messages=messages,
        response_format=FORMAT,
        stream=True,
        logprobs=True,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == DOCUMENT
    assert chunks[-1].choices[0].finish_reason == "stop"
    with client.beta.chat.completions.stream(model="echo", messages=messages, response_format=FORMAT) as events:
        assert events.get_final_completion().choices[0].message.content == DOCUMENT


def test_responses_say_the_format_they_were_held_to(echo: Running) -> None:
    client: Any = echo.openai()
    made = client.responses.create(model="echo", input=DOCUMENT, text={"format": FLAT})
    assert (made.output_text, made.status, made.text.format.type) == (DOCUMENT, "completed", "json_schema")
    assert made.text.format.schema_ == SCHEMA
    assert made.kaminari["choices"][0]["complete"] is True
    cut = client.responses.create(model="echo", input=DOCUMENT, text={"format": FLAT}, max_output_tokens=5)
    assert (cut.status, cut.kaminari["choices"][0]["complete"]) == ("incomplete", False)
    with client.responses.stream(model="echo", input=DOCUMENT, text={"format": FLAT}) as stream:
        assert stream.get_final_response().output_text == DOCUMENT


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 8}, r"\{.*"),
        ({"regex": DIGITS}, DIGITS),
        ({"structured_outputs": {"regex": DIGITS}}, DIGITS),
        ({"structured_outputs": {"json": {"const": [1]}}}, r"\[\s*1\s*\]"),
        ({"structured_outputs": {"json": '{"const": null}'}}, "null"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 8}, r"\{.*"),
        ({"guided_json": {"const": "x"}}, '"x"'),
        ({"guided_regex": DIGITS}, DIGITS),
        ({"guided_choice": ["né", "no"]}, "né|no"),
        ({"response_format": {"type": "text"}, "structured_outputs": {}, "guided_json": None}, "hi"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_every_way_to_ask_works_on_every_route(echo: Running, path: str, fields: dict[str, Any], pattern: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    reply = echo.post(path, {"model": "echo", **prompt, **fields})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    choice = answer["choices"][0] if "choices" in answer else answer
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert re.fullmatch(pattern, text, re.DOTALL), text
    report = answer["kaminari"]["choices"][0] if "kaminari" in answer else answer
    assert report.get("complete") == (None if text == "hi" else choice["finish_reason"] != "length")


def test_responses_take_the_extensions_too(echo: Running) -> None:
    reply = echo.post("/v1/responses", {"model": "echo", "input": "hi", "regex": DIGITS})
    assert re.fullmatch(DIGITS, reply.json()["output"][0]["content"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": ""}, "regex", "length"),
        ({"guided_regex": "a(?!b)"}, "guided_regex", "look-around"),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex", "lone backslash"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "unknown field"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length"),
        ({"guided_json": "[]"}, "guided_json", "must be an object"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "not supported"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "money"}}}},
            "response_format.json_schema.schema",
            "Invalid type: money",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing required field"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "Invalid value"),
        ({"response_format": FORMAT, "regex": "a"}, "regex", "both say"),
        ({"guided_choice": ["a"], "guided_json": {}}, "guided_choice", "both say"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "cannot go on past its end"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_the_field_at_fault_is_named(
    echo: Running, stream: bool, fields: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(echo.chat("hi", stream=stream, **fields))
    assert error["param"] == param
    assert words in error["message"]


def test_a_schema_of_a_response_that_cannot_be_enforced_is_named(echo: Running) -> None:
    body = {"model": "echo", "input": "hi", "text": {"format": {**FLAT, "schema": {"type": "money"}}}}
    assert error_of(echo.post("/v1/responses", body))["param"] == "text.format.schema"


def test_a_template_holds_the_reply_where_it_is_strict(echo: Running) -> None:
    # Its task takes no template, so only the order of the checks shows here; what it becomes is the core's.
    assert error_of(echo.post("/generate", {"prompt": "x", "strict": True}))["param"] == "strict"
    both = {"task": "ocr", "template": {"total": ""}, "strict": True, "regex": "a"}
    assert error_of(echo.post("/generate", both))["param"] == "template"


def test_the_pages_of_a_document_are_held_each(tiny: Running) -> None:
    body = {"model": "tiny", "file": picture(), "response_format": FORMAT, "blank_check": False}
    [page] = tiny.post("/v1/ocr", body).json()["pages"]
    assert valid(page["text"])
    assert (page["complete"], page["finish_detail"]) == (True, "structure_complete")
    fields = {"response_format": json.dumps(FORMAT), "blank_check": "false"}
    file = base64.b64decode(picture().partition(",")[2])
    form = tiny.http.post("/v1/ocr", data=fields, files={"file": ("page.png", file)})
    assert valid(form.json()["pages"][0]["text"])
    [free] = tiny.post("/v1/ocr", {"file": picture(), "max_tokens": 4}).json()["pages"]
    assert "complete" not in free
    for wrong, param in (
        ({"regex": "("}, "regex"),
        ({"regex": "a", "response_format": FORMAT}, "regex"),
        ({"strict": True}, "strict"),
    ):
        assert error_of(tiny.post("/v1/ocr", {"file": picture(), "blank_check": False, **wrong}))["param"] == param


def test_counting_tokens_finds_a_bad_schema(echo: Running) -> None:
    assert error_of(echo.post("/tokenize", {"prompt": "x", "regex": "("}))["param"] == "regex"


def test_the_native_stream_says_whether_the_reply_is_complete(echo: Running) -> None:
    events = events_of(echo.post("/generate_stream", {"prompt": DOCUMENT, "response_format": FORMAT}).text)
    assert (events[-1]["text"], events[-1]["complete"]) == (DOCUMENT, True)
    cut = echo.post("/generate", {"prompt": DOCUMENT, "response_format": FORMAT, "max_tokens": 3}).json()
    assert (cut["complete"], cut["finish_detail"]) == (False, "max_tokens")
    assert "complete" not in echo.post("/generate", {"prompt": "x"}).json()


def test_held_and_free_requests_share_an_engine(tiny: Running) -> None:
    bodies = [
        chat_body("read", model="tiny", max_tokens=60, **({"response_format": FORMAT} if number % 2 else {}))
        for number in range(6)
    ]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda body: tiny.post("/v1/chat/completions", body).json(), bodies))
    for number, reply in enumerate(replies):
        content = reply["choices"][0]["message"]["content"]
        if number % 2:
            assert valid(content)
        else:
            assert content == replies[0]["choices"][0]["message"]["content"]
