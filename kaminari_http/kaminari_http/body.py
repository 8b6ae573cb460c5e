"""Reading a request's body: the media type, the bytes, and parsing off the event loop, for pictures make bodies large.

msgspec names the place of a mistake, which becomes `param` of the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from kaminari_core.errors import RequestError
from kaminari_http.errors import ClientGoneError
from kaminari_http.unsupported import Harmless, refuse_unsupported

Parsed = TypeVar("Parsed")
Body = TypeVar("Body", bound=msgspec.Struct)
_PLACE = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_HINTS = {
    "role": "; choose system, developer, user, assistant or tool",
    "messages.type": "; content parts of type text, image_url and file are supported",
    "input.type": "; items of type message with parts of type input_text, input_image, input_file and output_text are supported",
}


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


def decode(body: bytes, kind: type[Body]) -> Body:
    """Parse a request body. Raises RequestError, whose `param` is the place of the mistake, such as `messages[0].role`."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not UTF-8 text (byte {error.start}).", code="invalid_json") from None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _mistake(str(error)) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.", code="invalid_json") from None


def convert(values: Mapping[str, Any], kind: type[Body]) -> Body:
    """The fields of a form, whose values are texts where they are no objects. Raises RequestError as `decode` does."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _mistake(str(error)) from None


def decode_supported(body: bytes, kind: type[Body], harmless: Harmless) -> Body:
    """Parse a request body of OpenAI's API. Raises RequestError also for keys that are known and not supported, by name."""
    request = decode(body, kind)
    refuse_unsupported(msgspec.json.decode(body, type=dict[str, msgspec.Raw]), harmless)
    return request


def _mistake(message: str) -> RequestError:
    """msgspec's message in the sender's terms: `$.messages[0].role` becomes the param, Python types become JSON types."""
    found = _PLACE.search(message)
    path = found["path"] if found else ""
    text = message[: found.start()] if found else message
    text = re.sub(
        r"`[^`]*`", lambda name: re.sub(r"\w+", lambda word: _JSON_NAMES.get(word[0], word[0]), name[0]), text
    )
    if missing := re.search(r"(?:missing required|unknown) field `(?P<field>[^`]*)`", text):
        path = f"{path}.{missing['field']}".lstrip(".")
    if text.startswith("Invalid"):
        place, _, field = path.rpartition(".")
        text += _HINTS.get(field) or _HINTS.get(f"{place.partition('[')[0]}.{field}", "")
    return RequestError(f"{path or 'body'}: {text}.", param=path or None)
