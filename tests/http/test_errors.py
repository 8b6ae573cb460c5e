"""Which status, code and headers each error of the core becomes."""

from __future__ import annotations

import json

import pytest

from kaminari_core.errors import (
    DeadlineError,
    EngineClosedError,
    EngineError,
    EngineRestartedError,
    EngineUnhealthyError,
    KaminariError,
    PoisonError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from kaminari_http.errors import failure_of

AGAIN, NEVER = {"Retry-After": "5"}, {"X-Should-Retry": "false"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (RequestError("x", param="p", code="c"), 400, "invalid_request_error", "c", {}),
        (RequestError("x", code="model_not_found"), 404, "invalid_request_error", "model_not_found", {}),
        (PromptTooLongError("x", 5000), 400, "invalid_request_error", "context_length_exceeded", {}),
        (QueueFullError("x", retry_after=2.6), 429, "rate_limit_error", "queue_full", {"Retry-After": "3"}),
        (QueueFullError("x", retry_after=0.1), 429, "rate_limit_error", "queue_full", {"Retry-After": "1"}),
        (EngineClosedError("x"), 503, "server_error", "engine_closed", AGAIN),
        (EngineUnhealthyError("x"), 503, "server_error", "engine_unhealthy", AGAIN),
        (EngineRestartedError("x"), 503, "server_error", "engine_restarted", AGAIN),
        (PoisonError("x"), 500, "server_error", "request_kills_engine", NEVER),
        (DeadlineError("x"), 504, "server_error", "timeout", NEVER),
        (EngineError("x"), 500, "server_error", None, {}),
        (KaminariError("x"), 500, "server_error", None, {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors(error: Exception, status: int, kind: str, code: str | None, headers: dict[str, str]) -> None:
    failure = failure_of(error)
    assert (failure.status, dict(failure.headers)) == (status, headers)
    param = getattr(error, "param", None)
    assert json.loads(failure.json()) == {"error": {"message": "x", "type": kind, "param": param, "code": code}}


def test_an_unknown_exception_tells_nothing_about_itself() -> None:
    failure = failure_of(ValueError("/secret/path"))
    assert failure.status == 500
    assert b"secret" not in failure.json()
