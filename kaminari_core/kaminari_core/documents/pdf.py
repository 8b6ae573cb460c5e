"""PDF pages -> pixels, with pdfium.

pdfium is not safe to use from two threads, not even for two documents, so whatever calls it holds one lock. A document is opened
anew for each page: that takes about a millisecond, and leaves nothing open that somebody would have to close in the right order.
"""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from PIL import Image

from kaminari_core.errors import DocumentError, UsageError

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage

POINTS_PER_INCH: Final = 72
PDFIUM: Final = threading.Lock()
"""The library's state is one for the whole process, and so is this."""
WHITE: Final = ((255, 255),) * 3
"""Least and greatest value of each channel of an empty page."""
REASONS: Final = (
    ("password", "encrypted_document", "it is encrypted with a password; save it without one"),
    ("security", "encrypted_document", "its encryption is not supported; save it without"),
    ("", "damaged_document", "the PDF file is damaged"),
)
"""A word of pdfium's message -> the code and the words of ours."""


def is_available() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec("pypdfium2") is not None


def count_pages(data: bytes, name: str) -> int:
    """How many pages a PDF file has, at least 1. Raises DocumentError, with `name` as its param."""
    with PDFIUM, _opened(data, name) as document:
        count = len(document)
    if count < 1:
        raise DocumentError(f"{name}: the PDF file has no pages", param=name, code="damaged_document")
    return count


def draw_page(data: bytes, name: str, number: int, dpi: float, most_pixels: int) -> Image.Image:
    """Draw a page, counted from 1, on white, with its annotations and the values of form fields, upright, as RGB.

    Raises DocumentError, with `name` as its param, for a page that is damaged or would have more than `most_pixels` pixels.
    """
    import pypdfium2

    with PDFIUM, _opened(data, name) as document:
        try:
            # Without this, what was filled into a form is not drawn.
            document.init_forms()
            page = document[number - 1]
            _check_size(page.get_size(), name, dpi, most_pixels)
            _check_pictures(page, name, most_pixels)
            drawn: Image.Image = page.render(scale=dpi / POINTS_PER_INCH, rev_byteorder=True).to_pil()
            image = drawn.convert("RGB")
            if image.getextrema() == WHITE:
                _check_decodable(page)
            return image
        except pypdfium2.PdfiumError as error:
            raise DocumentError(
                f"{name}: this page of the PDF file is damaged ({error})", param=name, code="damaged_page"
            ) from error


def _check_size(size: tuple[float, float], name: str, dpi: float, most: int) -> None:
    width, height = (points * dpi / POINTS_PER_INCH for points in size)
    if not (math.isfinite(width * height) and width >= 1 and height >= 1):
        raise DocumentError(f"{name}: this page of the PDF file has no size", param=name, code="damaged_page")
    if math.ceil(width) * math.ceil(height) > most:
        raise DocumentError(
            f"{name}: drawn with {dpi:g} dpi the page has {width:.0f} x {height:.0f} pixels, more than the {most:,} allowed "
            "(max-image-pixels); ask for fewer dpi",
            param=name,
            code="image_too_large",
        )


def _check_pictures(page: PdfPage, name: str, most: int) -> None:
    """Refuse a page with a picture in it that would take more memory than the page, from what the file says of its size."""
    from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE

    for picture in page.get_objects(filter=[FPDF_PAGEOBJ_IMAGE]):
        width, height = picture.get_px_size()
        if width * height > most:
            raise DocumentError(
                f"{name}: this page of the PDF file has a picture of {width} x {height} pixels, more than the {most:,} allowed "
                "(max-image-pixels)",
                param=name,
                code="image_too_large",
            )


def _check_decodable(page: PdfPage) -> None:
    """pdfium leaves out what it cannot decode and says nothing: a scan would become an empty page. Raises PdfiumError."""
    from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE

    for picture in page.get_objects(filter=[FPDF_PAGEOBJ_IMAGE]):
        picture.get_bitmap().close()


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[PdfDocument]:
    """The document, closed at the end. Hold PDFIUM. Raises DocumentError, and UsageError when pypdfium2 is missing."""
    try:
        import pypdfium2
    except ImportError:
        raise UsageError("reading PDF files needs pypdfium2: pip install 'kaminari-core[pdf]'") from None
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        code, words = next((code, words) for word, code, words in REASONS if word in str(error).lower())
        raise DocumentError(f"{name}: {words} ({error})", param=name, code=code) from error
    try:
        yield document
    finally:
        document.close()
