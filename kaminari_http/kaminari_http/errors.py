"""One error object for every failure: which status, type and code each exception becomes.

All routes raise; the conversion is here alone, so that a failure looks the same on every path, before and after the first byte
of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kaminari_core.errors import (
    DeadlineError,
    EngineClosedError,
    EngineRestartedError,
    EngineUnhealthyError,
    KaminariError,
    PoisonError,
    QueueFullError,
    RequestError,
)

STATUS_OF_CODE = {
    "origin_not_allowed": 403,
    "model_not_found": 404,
    "body_too_large": 413,
    "page_too_large": 413,
    "unsupported_media_type": 415,
}
FINAL = {"X-Should-Retry": "false"}
"""OpenAI's clients send a request again by themselves after 5xx. One that set itself a limit, or kills engines, must not be."""
CODE_OF_STATUS = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}


class ClientGoneError(KaminariError):
    """The client closed its connection before the reply was complete; nobody reads what is answered to it."""


class ErrorBody(msgspec.Struct):
    """The fields of `error` in every error reply; `param` and `code` are null where nothing is to be named."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """`{"error": {...}}`."""

    error: ErrorBody


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in HTTP terms."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> bytes:
        """The reply's body."""
        return msgspec.json.encode(ErrorReply(self.body))

    def response(self) -> Response:
        """The reply itself."""
        return Response(self.json(), self.status, dict(self.headers), "application/json")


def failure_of(error: Exception) -> Failure:
    """Name the status and the error object of any exception; an unknown one tells nothing about itself."""
    match error:
        case RequestError():
            status = STATUS_OF_CODE.get(error.code or "", 400)
            return Failure(status, ErrorBody(str(error), "invalid_request_error", error.param, error.code))
        case QueueFullError():
            seconds = max(1, round(error.retry_after))
            return Failure(
                429, ErrorBody(str(error), "rate_limit_error", None, "queue_full"), {"Retry-After": str(seconds)}
            )
        case EngineClosedError():
            return unavailable(str(error), "engine_closed")
        case EngineUnhealthyError() | EngineRestartedError():
            return unavailable(str(error), error.code)
        case DeadlineError():
            return Failure(504, ErrorBody(str(error), "server_error", None, error.code), FINAL)
        case PoisonError():
            return Failure(500, ErrorBody(str(error), "server_error", None, error.code), FINAL)
        case ClientGoneError():
            # The status that nginx logs for this; it is only seen in our own log.
            return Failure(499, ErrorBody(str(error), "client_closed_request"))
        case KaminariError():
            return Failure(500, ErrorBody(str(error), "server_error", None, error.code))
        case HTTPException():
            return _http(error)
    return Failure(500, ErrorBody("The server failed; its log has the reason under this request id.", "server_error"))


def unavailable(message: str, code: str | None) -> Failure:
    """503: this server cannot answer now."""
    return Failure(503, ErrorBody(message, "server_error", None, code), {"Retry-After": "5"})


def unauthorized() -> Failure:
    """401: no key, or one that is not known."""
    body = ErrorBody(
        "Send a valid key as `Authorization: Bearer KEY`.", "authentication_error", None, "invalid_api_key"
    )
    return Failure(401, body, {"WWW-Authenticate": "Bearer"})


def _http(error: HTTPException) -> Failure:
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    body = ErrorBody(error.detail, kind, None, CODE_OF_STATUS.get(error.status_code))
    return Failure(error.status_code, body, error.headers or {})
