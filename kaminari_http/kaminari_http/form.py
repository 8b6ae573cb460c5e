"""Reading a request's body as a form with a file in it, `multipart/form-data`.

A page of another site may send such a form, and with it work for this server, without asking first; browsers say so in
`Origin`, and only the sites of `--cors-origin` are let in.
"""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request

from kaminari_core.errors import RequestError
from kaminari_http.body import Body, convert
from kaminari_http.errors import ClientGoneError

FIELDS: Final = 32
FIELD_BYTES: Final = 2**20
FILE: Final = "file"


def is_form(request: Request) -> bool:
    """Whether the body says that it is a form."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data"


async def read_form(request: Request, kind: type[Body], allowed: tuple[str, ...]) -> tuple[Body, bytes | str]:
    """The fields of a form as `kind`, and its `file`: the bytes of one, or the text of a field of that name.

    `allowed` are the origins of other sites that may send one. Raises RequestError.
    """
    _check_origin(request, allowed)
    try:
        async with request.form(max_files=1, max_fields=FIELDS, max_part_size=FIELD_BYTES) as form:
            sent = form.multi_items()
            fields = {name: value for name, value in sent if isinstance(value, str)}
            files = [value for _, value in sent if isinstance(value, UploadFile)]
            if len({name for name, _ in sent}) != len(sent):
                raise RequestError("The form has two fields of one name.", param="body")
            others = [name for name, value in sent if isinstance(value, UploadFile) and name != FILE]
            if others:
                raise RequestError(f"The form's file is called {others[0]!r}; call it {FILE!r}.", param=FILE)
            file: bytes | str = await files[0].read() if files else fields.pop(FILE, "")
    except ClientDisconnect:
        raise ClientGoneError("The client left before it had sent its request.") from None
    if not file:
        raise RequestError("The form has no file, or an empty one; send one as the field `file`.", param=FILE)
    return convert({name: _value(name, text) for name, text in fields.items()}, kind), file


def _value(name: str, text: str) -> Any:
    """The value of a field: JSON where that is an object, else the text, which `convert` takes for a number or the like."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} begins like JSON, but is none: {error}.", param=name) from None


def _check_origin(request: Request, allowed: tuple[str, ...]) -> None:
    origin = request.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise RequestError(
            f"Pages of {origin!r} may not send forms here (--cors-origin).", param="Origin", code="origin_not_allowed"
        )
