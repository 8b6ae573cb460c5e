"""`/v1/completions` through the openai client: a view on the same engine as chat completions."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.http.serving import Running
from tests.http.test_bad_requests import error_of


def create(server: Running, prompt: Any, **fields: Any) -> Any:
    return server.openai().completions.create(model="echo", prompt=prompt, **fields)


def test_plain_reply(echo: Running) -> None:
    reply = create(echo, "hello")
    assert reply.id.startswith("cmpl-")
    assert (reply.object, reply.model) == ("text_completion", "echo")
    [choice] = reply.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "hello", "stop", None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (6, 6, 12)


def test_several_prompts_with_several_choices(echo: Running) -> None:
    reply = create(echo, ["one", "three"], n=2, max_tokens=4)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in reply.choices] == [
        (0, "one", "stop"), (1, "one", "stop"), (2, "thre", "length"), (3, "thre", "length"),
    ]  # fmt: skip
    # Every prompt counts once, every reply counts.
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4 + 6, 2 * 4 + 2 * 4)


@pytest.mark.parametrize("prompt", ["ABCDEF", ["AB", "CDE"], "\u6f22\u5b57 d\N{COMBINING CARON}"])
def test_stream_equals_plain(echo: Running, prompt: Any) -> None:
    fields: dict[str, Any] = {"stop": "F", "logprobs": 2}
    plain = create(echo, prompt, **fields)
    chunks = list(create(echo, prompt, **fields, stream=True, stream_options={"include_usage": True}))
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    for choice in plain.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            together = [entry for part in parts if part.logprobs for entry in getattr(part.logprobs, name)]
            assert together == getattr(choice.logprobs, name), name
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens


def test_logprobs_in_the_older_shape(echo: Running) -> None:
    logprobs = create(echo, "a\u6f22b", logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xe6", "bytes:\\xbc", "bytes:\\xa2", "b"]
    assert logprobs.text_offset == [0, 1, 1, 1, 2]
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]
    assert [next(iter(top.values())) for top in logprobs.top_logprobs] == logprobs.token_logprobs
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert create(echo, "ab", logprobs=0).choices[0].logprobs.top_logprobs is None


def test_same_reply_as_chat(tiny: Running) -> None:
    fields: dict[str, Any] = {"model": "tiny", "temperature": 0.8, "seed": 5, "max_tokens": 12}
    chat = tiny.openai().chat.completions.create(messages=[{"role": "user", "content": "hello"}], **fields)
    assert tiny.openai().completions.create(prompt="hello", **fields).choices[0].text == chat.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"best_of": True}, "best_of", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"prompt": None}, "prompt", None),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": []}, "prompt", None),
        ({"prompt": ["a", ""]}, "prompt[1]", None),
        ({"prompt": [1, 2]}, "prompt[0]", None),
        ({"prompt": ["a"] * 65}, "prompt", None),
        ({"prompt": "x" * 600}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 600, "stream": True}, "prompt", "context_length_exceeded"),
        ({"logprobs": 21}, "logprobs", None),
        ({"logprobs": True}, "logprobs", None),
        ({"stream_options": {}}, "stream_options", None),
    ],
    ids=str,
)
def test_the_field_at_fault_is_named(echo: Running, fields: dict[str, Any], param: str, code: str | None) -> None:
    error = error_of(echo.post("/v1/completions", {"model": "echo", "prompt": "hi", **fields}))
    assert (error["param"], error["code"]) == (param, code)


def test_harmless_values(echo: Running) -> None:
    assert create(echo, "hi", echo=False, best_of=1, suffix=None, user="u").choices[0].text == "hi"


def test_unknown_model(echo: Running) -> None:
    with pytest.raises(openai.NotFoundError):
        echo.openai().completions.create(model="other", prompt="hi")
    echo.settle()
