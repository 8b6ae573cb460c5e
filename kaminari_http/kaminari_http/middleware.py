"""What happens around every route: request ids and log lines, failures, keys, and the limit on bodies. Pure ASGI classes.

They are stacked in the order of this file, from outside to inside, so that every answer (a refused key, an oversize body, a
crash) carries the request id and the one error object. `app.py` stacks them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kaminari_core.errors import RequestError
from kaminari_http.errors import failure_of, unauthorized

logger = logging.getLogger(__name__)
REQUEST_ID = "X-Request-Id"
SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
DRAIN_SECONDS = 5.0
HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/decode"})
OPEN_PATHS = HEALTH_PATHS | {"/"}
"""What needs no key: health, and the page, which is the same for everybody and asks for the key itself."""


class RequestIds:
    """Takes a sane `X-Request-Id` or makes one, puts it on the answer and in the scope's state, and logs one line a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if SANE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            # What is polled all the time would drown the rest.
            level = logging.DEBUG if scope["path"] in {*HEALTH_PATHS, "/metrics"} else logging.INFO
            # The path is quoted: what a client sends must not be able to forge a line.
            path, seconds = scope["path"], time.monotonic() - began
            facts = {"request_id": request_id, "method": scope["method"], "path": path, "status": status}
            facts["seconds"] = round(seconds, 6)
            logger.log(level, "%s %s %r %s %.3fs", request_id, scope["method"], path, status, seconds, extra=facts)


class Failures:
    """Turns whatever is raised further inside into the error object, and logs what nobody foresaw."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            failure = failure_of(error)
            if failure.status == 500:
                request_id = scope["state"]["request_id"]
                logger.exception("%s failed", request_id, extra={"request_id": request_id})
            if started:
                raise
            await failure.response()(scope, receive, send)


class Authentication:
    """Asks for one of the keys as a bearer token on every path but `OPEN_PATHS`; preflights (OPTIONS) carry none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # WebSocket routes of plugins are asked for the key as well; the response then refuses the handshake.
        closed = scope["type"] in ("http", "websocket") and not self._open(scope)
        answer = unauthorized().response() if closed else self._app
        await answer(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope.get("method") == "OPTIONS":
            return True
        # ASGI header values are bytes; Headers decodes them as latin-1, so encoding again gives what was sent.
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        sent = token.strip().encode("latin-1")
        # All keys are compared, so that the time taken tells nothing about which one was close.
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Refuses a body of more than `most` bytes, declared or not, with 413.

    What a refused client still sends is read and dropped for a moment first: a connection that is closed with unread data is
    reset, and the client would not see the answer.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._most:
            # A client that waits to be told to go on (RFC 9110, section 10.1.1) has sent nothing, and is told not to.
            if headers.get("expect", "").lower() != "100-continue":
                await self._drop(receive)
            await failure_of(self._error()).response()(scope, receive, send)
            return
        seen = 0

        async def counting_receive() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                if message.get("more_body"):
                    await self._drop(receive)
                raise self._error()
            return message

        await self._app(scope, counting_receive, send)

    def _error(self) -> RequestError:
        return RequestError(
            f"The body is larger than the limit of {self._most} bytes (--max-body).", code="body_too_large"
        )

    async def _drop(self, receive: Receive) -> None:
        dropped = 0
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while dropped <= self._most:
                    message = await receive()
                    dropped += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            return
