"""Requests that cannot be served: a 400 (or a neighbour of it) with the error object, never a 500, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.serving import Running, chat_body, picture, picture_message

PATHS = ["/v1/chat/completions", "/generate", "/generate_stream"]
JSON_TYPE = {"Content-Type": "application/json"}
MESSAGES = chat_body("hi")["messages"]


def error_of(reply: Any, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


TURNS = b'"messages": [{"role": "user", "content": "x"}]'
BROKEN = {
    "empty": b"",
    "cut off": b"{",
    "list": b"[]",
    "list of objects": b"[{}]",
    "null": b"null",
    "number": b"3",
    "string": b'"text"',
    "empty object": b"{}",
    "UTF-16": "{}".encode("utf-16"),
    "GBK": '{"model": "\u4e2d\u6587"}'.encode("gbk"),
    "stray byte": b'{"model": "echo", "prompt": "\xff"}',
    "lone surrogate": b'{"model": "echo", "prompt": "\\ud800"}',
    "not a number": b'{"model": "echo", %s, "temperature": NaN}' % TURNS,
    "infinity": b'{"model": "echo", %s, "temperature": Infinity}' % TURNS,
    "overflow": b'{"model": "echo", %s, "temperature": 1e999}' % TURNS,
    "two objects": b'{"model": "echo"} {"model": "echo"}',
    "deep list": b"[" * 100_000,
    "deep messages": b'{"model": "echo", "messages": ' + b'[{"role": "user", "content": ' * 50_000,
    "deep unknown key": b'{"model": "echo", "other": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_json(echo: Running, path: str, name: str) -> None:
    error = error_of(echo.http.post(path, content=BROKEN[name], headers=JSON_TYPE))
    assert error["type"] == "invalid_request_error"


def test_json_that_is_not_utf_8_says_so(echo: Running) -> None:
    error = error_of(echo.http.post("/generate", content="{'\u4e2d'}".encode("gbk"), headers=JSON_TYPE))
    assert (error["code"], "UTF-8" in error["message"]) == ("invalid_json", True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
def test_other_media_types_are_refused(echo: Running, path: str, kind: str) -> None:
    reply = echo.http.post(path, content=json.dumps(chat_body("hi")), headers={"Content-Type": kind})
    assert "application/json" in error_of(reply, 415)["message"]


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json", ""]
)
def test_media_types_that_are_json(echo: Running, kind: str) -> None:
    content = json.dumps(chat_body("hi"))
    assert echo.http.post("/v1/chat/completions", content=content, headers={"Content-Type": kind}).status_code == 200


def test_compressed_bodies_are_refused(echo: Running) -> None:
    headers = {**JSON_TYPE, "Content-Encoding": "gzip"}
    assert "gzip" in error_of(echo.http.post("/generate", content=b"x", headers=headers), 415)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": True}, "stream_options"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_field_at_fault_is_named(echo: Running, fields: dict[str, Any], param: str) -> None:
    error = error_of(echo.post("/v1/chat/completions", {**chat_body("hi"), **fields}))
    assert error["param"] == param
    assert "`int`" not in error["message"]
    assert "`str`" not in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("guided_grammar", "start: /a/"),
        ("min_p", 0.1),
        ("store", True),
    ],
)
def test_known_keys_that_are_not_supported_are_refused_by_name(echo: Running, name: str, value: Any) -> None:
    error = error_of(echo.chat("hi", **{name: value}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_picture_for_a_model_without_eyes(echo: Running) -> None:
    for stream in (False, True):
        body = {"model": "echo", "messages": [picture_message(picture())], "stream": stream}
        error = error_of(echo.post("/v1/chat/completions", body))
        assert (error["code"], error["param"]) == ("pictures_not_supported", "messages[0].content[0]")
    assert error_of(echo.post("/generate", {"task": "ocr", "images": [picture()]}))["param"] == "images[0]"


def test_harmless_values_of_unsupported_keys_and_unknown_keys_are_accepted(echo: Running) -> None:
    fields = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False,
        "functions": None, "audio": None, "modalities": ["text"], "service_tier": "auto", "min_p": 0,
        "user": "u", "metadata": {"a": "b"}, "something_new": {"deep": [1, 2]}, "n": 1, "logprobs": False, "top_k": -1,
        "logit_bias": None, "stop": None, "seed": None, "stream_options": None, "stream": None, "temperature": None,
        "presence_penalty": 0, "top_logprobs": None,
    }  # fmt: skip
    reply = echo.chat("hi", **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "task": "ocr"}, "task"),
        ({"prompt": "x", "messages": MESSAGES}, "messages"),
        ({"images": [picture()], "messages": MESSAGES}, "messages"),
        ({"task": "sing"}, "task"),
        ({"prompt": "x", "max_new_tokens": 5}, "max_new_tokens"),
        ({"inputs": "x", "parameters": {}}, "inputs"),
        ({"prompt": "x", "images": "data:"}, "images"),
        ({"prompt": "x", "images": ["https://example.org/x.png"]}, "images[0]"),
        ({"prompt": "x", "images": [{"url": "data:"}]}, "images[0]"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_native_field_at_fault(echo: Running, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(echo.post(path, body))["param"] == param


def test_unknown_task_and_model_name_what_there_is(echo: Running) -> None:
    assert "caption, ocr" in error_of(echo.post("/generate", {"task": "sing"}))["message"]
    error = error_of(echo.post("/generate", {"prompt": "x", "model": "other"}), 404)
    assert (error["code"], "echo" in error["message"]) == ("model_not_found", True)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/some/other", 404, "model_not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/generate", 405, "method_not_allowed"),
        ("GET", "/%00%ff/..%2f", 404, "not_found"),
    ],
)
def test_unknown_paths_and_methods(echo: Running, method: str, path: str, status: int, code: str) -> None:
    reply = echo.http.request(method, path)
    assert error_of(reply, status)["code"] == code
    assert ("allow" in reply.headers) == (status == 405)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = (
    "messages max_tokens max_completion_tokens temperature top_p top_k seed stop n logprobs top_logprobs logit_bias stream "
    "stream_options tools response_format presence_penalty repetition_penalty unknown"
)
FIELDS = st.dictionaries(st.sampled_from(NAMES.split()), JSON_VALUES, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS)
def test_any_values_are_served_or_refused(echo: Running, fields: dict[str, Any]) -> None:
    reply = echo.post("/v1/chat/completions", {**chat_body("hi", max_tokens=3), **fields})
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        error_of(reply)


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=64))
def test_any_bytes_are_refused(echo: Running, body: bytes) -> None:
    error_of(echo.http.post("/generate", content=body, headers=JSON_TYPE))


def test_the_server_lives_after_all_that(echo: Running) -> None:
    echo.settle()
    assert echo.http.get("/health").json() == {"status": "ok"}
    assert echo.chat("still here").json()["choices"][0]["message"]["content"] == "still here"
