"""Server-sent events: framing, keep-alive, and what happens when the reply fails after the headers or the client leaves."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from kaminari_core.errors import KaminariError
from kaminari_http.call import Call, unless_client_leaves
from kaminari_http.errors import failure_of

logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_SECONDS = 15.0
FIRST_EVENT_SECONDS = 15.0
"""How long the headers wait for the first event, so that an early failure has a status of its own. Then keep-alives begin."""


def event(value: msgspec.Struct) -> bytes:
    """One event: a `data:` line of JSON and a blank line."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: msgspec.Struct) -> bytes:
    """One event with a name, for clients that listen by it."""
    return b"event: " + name.encode() + b"\n" + event(value)


class Streamed(Protocol):
    """What is behind a stream: a Call, or what is used like one."""

    http_id: str

    def cancel(self) -> None:
        """End what is still running; harmless when nothing is."""
        ...


class EventStream(EventSourceResponse):
    """Streams the events of a call; ends the call whatever way the response ends, even when it never began."""

    def __init__(self, call: Streamed, events: AsyncIterator[bytes]) -> None:
        super().__init__(_guarded(call, events), ping=KEEP_ALIVE_SECONDS, ping_message_factory=_keep_alive, sep="\n")
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()


async def open_stream(call: Call, events: AsyncIterator[bytes], receive: Receive) -> EventStream:
    """Answer with `events` of a call. Raises the failure of a request that fails before the first event, and ClientGoneError
    when the client leaves before it.
    """
    try:
        await unless_client_leaves(receive, call.first(FIRST_EVENT_SECONDS))
    except BaseException:
        call.cancel()
        raise
    return EventStream(call, events)


async def _guarded(call: Streamed, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, and after a failure the error object as the last one: the status has been sent already."""
    try:
        async for data in events:
            yield data
    except KaminariError as error:
        logger.warning("%s failed in its stream: %s", call.http_id, error, extra={"request_id": call.http_id})
        yield b"data: " + failure_of(error).json() + b"\n\n"
    except Exception as error:
        logger.exception("%s failed in its stream", call.http_id, extra={"request_id": call.http_id})
        yield b"data: " + failure_of(error).json() + b"\n\n"


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="keep-alive", sep="\n")
