"""The bytes of a file -> its pages, decoded one at a time.

    open_document(data, name) -> Document: format, number of pages -> sheet(n): the pixels of one page

What a file is, its first bytes say. A picture is one page, a TIFF file as many as it has, a PDF as well. Pages are decoded when
they are asked for, so that a long document costs the memory of the pages in work; sizes are checked against the limits before
that. A document keeps no open file and no state, so its pages may be asked for from any thread.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final, Protocol

from PIL import Image, TiffImagePlugin

from kaminari_core.config import EngineConfig
from kaminari_core.documents import pdf
from kaminari_core.errors import DocumentError, ImageError
from kaminari_core.images import (
    HEIF_EXTRA,
    Header,
    Picture,
    accepted_formats,
    check_limits,
    decode,
    read_header,
    sniff,
)

DEFAULT_DPI: Final = 200.0
"""Dots per inch that a PDF page is drawn with: A4 becomes 1654 x 2339 pixels, and print of 8 points 22 pixels high."""
LOWEST_DPI, HIGHEST_DPI = 10.0, 2400.0
SUBFILE_TYPE, REDUCED = 254, 1
"""A TIFF tag, and its bit that marks a smaller copy of another page."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """One page, decoded: `image` is upright RGB; `decoded` and `rotation` are as in `flow.Saw`.

    `data` is the encoded picture that shows just this page, where the file itself is one, else None.
    """

    image: Image.Image
    format: str
    decoded: tuple[int, int]
    rotation: str
    data: bytes | None

    def encoded(self, box: tuple[int, int, int, int] | None = None) -> bytes:
        """The page, or the part of it inside (left, top, right, bottom), as the bytes of a picture file."""
        if box is None and self.data is not None:
            return self.data
        buffer = io.BytesIO()
        # Pages are mostly paper, which the quickest level packs nearly as well as the others.
        (self.image if box is None else self.image.crop(box)).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()


class Document(Protocol):
    """A file whose pages can be decoded. `name` is what errors call it."""

    name: str
    format: str

    @property
    def pages(self) -> int:
        """How many pages there are, at least 1."""
        ...

    def sheet(self, number: int) -> Sheet:
        """Decode a page, counted from 1. Raises DocumentError or ImageError, about this page only."""
        ...


def open_document(data: bytes, name: str, config: EngineConfig, dpi: float = DEFAULT_DPI) -> Document:
    """Open a picture or document from the bytes of its file.

    Raises ImageError or DocumentError, with `name` as param, for what is in no accepted format, is damaged as a whole, or is a
    picture beyond the limits of `config`.
    """
    kind = sniff(data)
    if kind == "PDF":
        return PdfDocument(data, name, config, dpi)
    if kind not in accepted_formats():
        found = (
            "it is empty" if not data else f"it is of the format {kind}" if kind else "its content is of no known kind"
        )
        hint = HEIF_EXTRA if kind in ("HEIC", "AVIF") else ""
        raise DocumentError(
            f"{name}: {found}; accepted are {accepted_documents()}{hint}",
            param=name,
            code="unsupported_document_format",
        )
    if kind == "TIFF":
        return TiffDocument(data, name, config)
    return PictureDocument(data, name, config)


def accepted_documents() -> str:
    """What this installation reads, in words."""
    missing = "" if pdf.is_available() else " (with the extra kaminari-core[pdf])"
    return f"{', '.join(accepted_formats())} and PDF{missing}"


class PictureDocument:
    """A picture file: one page. Of an animation it is the first frame."""

    def __init__(self, data: bytes, name: str, config: EngineConfig) -> None:
        header = read_header(data, name)
        check_limits([header], config)
        self.name, self.format = name, header.format
        self._data = data

    @property
    def pages(self) -> int:
        """See Document."""
        return 1

    def sheet(self, number: int) -> Sheet:
        """See Document."""
        return _sheet(decode(read_header(self._data, self.name)), self._data)


class TiffDocument:
    """A TIFF file: as many pages as it has directories, smaller copies of others left out."""

    def __init__(self, data: bytes, name: str, config: EngineConfig) -> None:
        self.name, self.format = name, "TIFF"
        self._data, self._config = data, config
        self._frames = self._read_frames()

    @property
    def pages(self) -> int:
        """See Document."""
        return len(self._frames)

    def sheet(self, number: int) -> Sheet:
        """See Document."""
        header = self._header(self._frames[number - 1])
        check_limits([header], self._config)
        return _sheet(decode(header), self._data if len(self._frames) == 1 and not self._frames[0] else None)

    def _read_frames(self) -> list[int]:
        reader = self._header(0).reader
        assert isinstance(reader, TiffImagePlugin.TiffImageFile), "the signature is TIFF's"
        found = []
        try:
            for frame in range(reader.n_frames):
                reader.seek(frame)
                kind = reader.tag_v2.get(SUBFILE_TYPE, 0)
                if not (isinstance(kind, int) and kind & REDUCED):
                    found.append(frame)
        except Exception as error:  # as in images.read_header: Pillow's readers raise a dozen classes
            raise ImageError(
                f"{self.name}: the TIFF file is damaged behind page {len(found)} ({error})",
                param=self.name,
                code="damaged_document",
            ) from error
        return found or [0]

    def _header(self, frame: int) -> Header:
        """The header of one frame, from a reader of its own."""
        first = read_header(self._data, self.name)
        if frame == 0:
            return first
        try:
            first.reader.seek(frame)
        except Exception as error:  # as above
            raise ImageError(
                f"{self.name}: this page of the TIFF file is damaged ({error})", param=self.name, code="invalid_image"
            ) from error
        return Header(self.name, "TIFF", first.reader.size, first.reader)


class PdfDocument:
    """A PDF file, drawn at `dpi`."""

    def __init__(self, data: bytes, name: str, config: EngineConfig, dpi: float) -> None:
        if not LOWEST_DPI <= dpi <= HIGHEST_DPI:
            raise DocumentError(
                f"dpi is {dpi:g}, but must be between {LOWEST_DPI:g} and {HIGHEST_DPI:g}",
                param="dpi",
                code="invalid_dpi",
            )
        self.name, self.format = name, "PDF"
        self._data, self._config, self._dpi = data, config, dpi
        self._pages = pdf.count_pages(data, name)

    @property
    def pages(self) -> int:
        """See Document."""
        return self._pages

    def sheet(self, number: int) -> Sheet:
        """See Document."""
        image = pdf.draw_page(self._data, self.name, number, self._dpi, self._config.max_image_pixels)
        return Sheet(image, "PDF", image.size, "none", None)


def _sheet(picture: Picture, data: bytes | None) -> Sheet:
    return Sheet(picture.image, picture.format, picture.decoded, picture.rotation, data)
