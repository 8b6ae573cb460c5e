"""data: URLs as clients write them."""

from __future__ import annotations

import base64
import textwrap
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaminari_core.data_url import decode_data_url
from kaminari_core.errors import ImageError, RequestError

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC")
ODD = bytes(range(251, 256)) * 5  # its base64 has both + and / and needs padding
CODE = base64.b64encode(ODD).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{CODE}",
        f"DATA:IMAGE/PNG;BASE64,{CODE}",
        f"data:image/jpg;base64,{CODE}",
        f"data:image/x-png;charset=utf-8;base64,{CODE}",
        f'data:image/png;name="a b.png";base64,{CODE}',
        f"data:;base64,{CODE}",
        f"data:application/octet-stream; base64 ,{CODE}",
        f"  data:image/png;base64,{CODE}\n",
        "data:image/png;base64,\r\n" + "\r\n".join(textwrap.wrap(CODE, 10)),
        "data:image/png;base64,\n    " + "\n    ".join(textwrap.wrap(CODE, 7)),
        f"data:image/png;base64,{CODE.rstrip('=')}",
        "data:image/png;base64," + base64.urlsafe_b64encode(ODD).decode(),
        "data:image/png;base64," + urllib.parse.quote(CODE, safe=""),
        "data:image/png," + urllib.parse.quote(ODD),
        "data:," + urllib.parse.quote(ODD),
    ],
)
def test_what_clients_write(url: str) -> None:
    assert decode_data_url(url, "picture") == ODD


@given(st.binary(min_size=1, max_size=200), st.booleans(), st.booleans())
def test_any_bytes(data: bytes, safe: bool, padded: bool) -> None:
    code = (base64.urlsafe_b64encode if safe else base64.b64encode)(data).decode()
    assert decode_data_url("data:image/png;base64," + (code if padded else code.rstrip("=")), "picture") == data


@pytest.mark.parametrize(
    ("url", "error", "reason"),
    [
        ("data:image/png;base64", ImageError, "no comma"),
        ("data:image/png;base64,", ImageError, "no data"),
        ("data:image/png,", ImageError, "no data"),
        ("data:image/png;base64,AAAA*AAA", ImageError, r"'\*' at character 4"),
        ("data:image/png;base64,AAAA AAA", ImageError, r"' ' at character 4.*'\+'"),
        ("data:image/png;base64,AAA=AAAA", ImageError, "'=' at character 3"),
        ("data:image/png;base64,AAAAA", ImageError, "cut off: 5 "),
        ("data:image/png;base64,\u00e9AAA", ImageError, "at character 0"),
        ("https://example.com/a.png", RequestError, "only data: URLs are accepted, not https:"),
        ("HTTP://example.com/a.png", RequestError, "only data: URLs are accepted, not http:"),
        ("file:///etc/hostname", RequestError, "only data: URLs are accepted, not file:"),
        ("ftp://example.com", RequestError, "not ftp:"),
        ("/etc/hostname", RequestError, "files are not opened by path"),
        ("../secret.png", RequestError, "files are not opened by path"),
        ("C:\\picture.png", RequestError, "files are not opened by path"),
        ("", RequestError, "empty"),
        (base64.b64encode(PNG).decode(), RequestError, "bare base64.*data:image/png;base64,"),
        ("/9j/4AAQSkZJRgABAQ==", RequestError, "bare base64"),
        (base64.b64encode(ODD * 4).decode(), RequestError, "bare base64"),
    ],
)
def test_what_is_refused_says_why(url: str, error: type[RequestError], reason: str) -> None:
    with pytest.raises(error, match=rf"^messages\[0\]\.content\[1\]: .*{reason}") as caught:
        decode_data_url(url, "messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.code == "invalid_image_url"
