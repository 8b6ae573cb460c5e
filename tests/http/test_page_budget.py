"""A picture that needs more than memory is planned for: 413 with the numbers, and its neighbours are served."""

from __future__ import annotations

from kaminari_core.testing import TinyModel
from tests.http.serving import Start, picture, picture_message
from tests.http.test_bad_requests import error_of


def test_a_page_that_was_not_planned_for(start: Start) -> None:
    server = start(TinyModel, visual_tokens=64, page_tokens=16)
    fits, larger = picture(size=(128, 128)), picture(size=(256, 256))
    body = {"model": "echo", "max_tokens": 4}
    refused = server.post("/v1/chat/completions", {**body, "messages": [picture_message(fits, larger)]})
    error = error_of(refused, 413)
    assert error["code"] == "page_too_large"
    assert error["param"] == "messages[0].content[1]"
    assert "256 x 256 pixels take 64 visual tokens" in error["message"]
    assert "at most 16 (16,384 pixels" in error["message"]
    streamed = server.post("/v1/chat/completions", {**body, "stream": True, "messages": [picture_message(larger)]})
    assert error_of(streamed, 413)["code"] == "page_too_large"
    served = server.post("/v1/chat/completions", {**body, "messages": [picture_message(fits)]})
    assert served.status_code == 200
    assert served.json()["kaminari"]["saw"][0]["visual_tokens"] == 16
