"""`data:` URLs (RFC 2397) -> bytes, the only kind of URL that the core takes pictures in.

Clients write these in many ways; what is clear is accepted, what is not is refused with the part that is wrong. Nothing is
fetched here and no path is opened: a server that follows its clients' addresses reads what they may not.
"""

from __future__ import annotations

import base64
import re
from urllib.parse import unquote_to_bytes

from kaminari_core.errors import ImageError, RequestError
from kaminari_core.images import sniff

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
LINE_BREAK = re.compile(r"[ \t]*[\r\n\f][ \t\r\n\f]*|\t")
NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/]")
URL_SAFE = str.maketrans("-_", "+/")
EXAMPLE = "data:image/png;base64,iVBORw0KGgo..."


def decode_data_url(url: str, name: str) -> bytes:
    """The bytes that a data: URL carries, whatever type it declares.

    Accepts any case of the scheme, any parameters, line breaks and indentation, the URL-safe alphabet, missing padding,
    percent-encoded base64, and percent-encoded bytes without `;base64`. Raises RequestError for anything but a data: URL and
    ImageError for one that cannot be decoded, both with `name` as their param.
    """
    url = url.strip()
    scheme = SCHEME.match(url)
    if scheme is None or scheme[1].lower() != "data":
        raise RequestError(f"{name}: {_explain(url, scheme and scheme[1])}", param=name, code="invalid_image_url")
    header, comma, payload = url[scheme.end() :].partition(",")
    if not comma:
        raise _undecodable(name, f"has no comma between its type and its data; expected {EXAMPLE}")
    if any(parameter.strip().lower() == "base64" for parameter in header.split(";")[1:]):
        data = _decode_base64(payload, name)
    else:
        data = unquote_to_bytes(payload)
    if not data:
        raise _undecodable(name, "carries no data after the comma")
    return data


def _decode_base64(payload: str, name: str) -> bytes:
    if "%" in payload:
        payload = unquote_to_bytes(payload).decode("latin-1")
    digits = LINE_BREAK.sub("", payload.strip()).translate(URL_SAFE).rstrip("=")
    wrong = NOT_BASE64.search(digits)
    if wrong is not None:
        hint = "; was a '+' turned into a space on the way?" if wrong[0] == " " else ""
        raise _undecodable(name, f"has {wrong[0]!r} at character {wrong.start()} of its base64 data{hint}")
    if len(digits) % 4 == 1:
        raise _undecodable(name, f"is cut off: {len(digits)} characters are no whole number of base64 bytes")
    return base64.b64decode(digits + "=" * (-len(digits) % 4))


def _explain(url: str, scheme: str | None) -> str:
    if scheme is not None and len(scheme) > 1:
        return f"only data: URLs are accepted, not {scheme.lower()}:; send the picture itself as {EXAMPLE}"
    if not url:
        return f"the URL is empty; expected {EXAMPLE}"
    head = url[:64].translate(URL_SAFE)
    if NOT_BASE64.search(head.rstrip("=")) is None:
        head = head.rstrip("=")
        if len(url) >= 64 or sniff(base64.b64decode(head[: len(head) // 4 * 4])):
            return f"this looks like bare base64; put 'data:image/png;base64,' in front of it, as in {EXAMPLE}"
    return f"this is no data: URL, and files are not opened by path; send the picture itself as {EXAMPLE}"


def _undecodable(name: str, what: str) -> ImageError:
    return ImageError(f"{name}: the data: URL {what}", param=name, code="invalid_image_url")
