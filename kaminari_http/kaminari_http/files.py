"""Documents inside a conversation: each page becomes a picture of the message, in order.

A picture cannot be left out of a message without changing what it says, so a page that cannot be read fails the request. A
document that is to be read page by page belongs to `/v1/ocr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kaminari_core.config import EngineConfig
from kaminari_core.data_url import SCHEME, decode_data_url
from kaminari_core.documents.document import open_document
from kaminari_core.documents.pages import picture_of
from kaminari_core.errors import ImageError, RequestError
from kaminari_core.flow import ImagePart


def file_url(file_data: str | None, url: str | None, file_id: str | None, place: str) -> str:
    """The URL of a file part: its own, or one made of its data. Raises RequestError for a part that has none of both, or more."""
    if file_id is not None:
        raise RequestError(
            f"{place}: files are not kept here, so there is none with an id; send it as file_data",
            param=place,
            code="unsupported_parameter",
        )
    if (file_data is None) == (url is None):
        raise RequestError(f"{place}: send the file as file_data, a data: URL", param=place)
    if url is not None:
        return url
    assert file_data is not None, "one of both is there"
    # OpenAI's reference calls it base64, and its examples are data: URLs.
    return file_data if SCHEME.match(file_data.strip()) else f"data:application/pdf;base64,{file_data}"


def pages_of(data: bytes, place: str, config: EngineConfig) -> list[ImagePart]:
    """The pages of a picture or document. Raises DocumentError and ImageError, with `place` or a page of it as their param."""
    document = open_document(data, place, config)
    if document.pages > config.max_images:
        raise ImageError(
            f"{place}: the document has {document.pages} pages, but a request may have {config.max_images} pictures "
            "(max-images); send fewer pages, or read it with /v1/ocr",
            param=place,
            code="too_many_images",
        )
    pictures, pixels = [], 0
    for number in range(1, document.pages + 1):
        sheet = document.sheet(number)
        pixels += sheet.image.width * sheet.image.height
        if pixels > config.max_request_pixels:
            raise ImageError(
                f"{place}: its first {number} pages have {pixels:,} pixels, more than the {config.max_request_pixels:,} of all "
                "pictures of one request together (max-request-pixels); send fewer pages, or read it with /v1/ocr",
                param=place,
                code="image_too_large",
            )
        name = place if document.pages == 1 else f"{place}.page[{number}]"
        pictures.append(replace(picture_of(sheet, document, number), name=name))
    return pictures


def pages_of_url(url: str, place: str, fetched: Mapping[str, bytes], config: EngineConfig) -> list[ImagePart]:
    """As `pages_of`, of a file that was fetched or is in its data: URL."""
    return pages_of(fetched[url] if url in fetched else decode_data_url(url, place), place, config)
