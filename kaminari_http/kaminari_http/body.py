"""Reading a request's body: the media type, the bytes, and parsing off the event loop, for pictures make bodies large."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from kaminari_core.errors import RequestError
from kaminari_http.errors import ClientGoneError

Parsed = TypeVar("Parsed")


async def read_json(request: Request, parse: Callable[[bytes], Parsed]) -> Parsed:
    """The body as `parse` makes it, called in a worker thread. Raises RequestError for a body that does not say it is JSON."""
    _check_media_type(request.headers)
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGoneError("The client left before it had sent its request.") from None
    return await run_in_threadpool(parse, body)


def _check_media_type(headers: Headers) -> None:
    """A page of another site may send other media types without asking first, and a compressed body is not read here."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError(
            f"The body is sent as {media_type!r}; send JSON with `Content-Type: application/json`.",
            code="unsupported_media_type",
        )
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise RequestError(
            f"The body is sent with `Content-Encoding: {encoding}`; send it uncompressed.",
            code="unsupported_media_type",
        )
