"""`/tokenize`: what a request would cost is what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from kaminari_core.testing import TinyModel
from tests.http.serving import Running, Start, picture, picture_message
from tests.http.test_bad_requests import error_of

BODIES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "hello"},
    "task": {"task": "ocr", "images": [picture(size=(96, 64))]},
    "messages": {
        "messages": [picture_message(picture(), picture("blue", (200, 90))), {"role": "assistant", "content": "x"}]
    },
}


@pytest.mark.parametrize("name", BODIES)
def test_counts_are_those_of_the_reply(tiny: Running, name: str) -> None:
    asked = tiny.post("/tokenize", BODIES[name])
    assert asked.status_code == 200, asked.text
    counted = asked.json()
    reply = tiny.post("/generate", {**BODIES[name], "max_tokens": 1}).json()
    assert (counted["count"], counted["image_tokens"]) == (
        reply["usage"]["prompt_tokens"],
        reply["usage"]["image_tokens"],
    )
    assert counted["saw"] == reply["saw"]
    assert len(counted["tokens"]) == counted["count"]
    assert (counted["model"], counted["fits"], counted["max_model_len"]) == ("tiny", True, 512)
    assert counted["room"] == 512 - counted["count"]


def test_tokens_of_a_text(echo: Running) -> None:
    assert echo.post("/tokenize", {"prompt": "hi"}).json()["tokens"] == [ord("h"), ord("i"), 256]


def test_what_does_not_fit_is_still_counted(start: Start) -> None:
    server = start(TinyModel, max_length=100)
    body = {"prompt": "read", "images": [picture(size=(192, 192))] * 3}
    counted = server.post("/tokenize", body).json()
    assert (counted["fits"], counted["room"], counted["tokens"]) == (False, 0, None)
    assert counted["image_tokens"] == sum(saw["visual_tokens"] for saw in counted["saw"]) > 96
    # The turn's token and the four letters.
    assert (len(counted["saw"]), counted["count"]) == (3, counted["image_tokens"] + 5)
    assert f"{counted['count']} tokens" in error_of(server.post("/generate", body))["message"]


def test_nothing_is_generated(tiny: Running) -> None:
    before = tiny.engine.stats()
    tiny.post("/tokenize", BODIES["task"])
    after = tiny.engine.stats()
    assert (after.prompt_tokens, after.generated_tokens) == (before.prompt_tokens, before.generated_tokens)


def test_refused_as_generate_refuses(echo: Running, tiny: Running) -> None:
    assert error_of(echo.post("/tokenize", {"prompt": "x", "images": [picture()]}))["code"] == "pictures_not_supported"
    assert (
        error_of(tiny.post("/tokenize", {"prompt": "x", "images": ["data:image/png;base64,AAAA"]}))["param"]
        == "images[0]"
    )
    assert error_of(tiny.post("/tokenize", {"prompt": "x", "model": "other"}), 404)["code"] == "model_not_found"
    assert error_of(tiny.post("/tokenize", {}))["param"] == "prompt"
