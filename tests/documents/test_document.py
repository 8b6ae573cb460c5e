"""The bytes of a file -> its pages: every accepted format, and named errors for the rest."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pillow_heif
import pytest
from PIL import ExifTags, Image, TiffImagePlugin

from kaminari_core.config import EngineConfig
from kaminari_core.documents.document import open_document
from kaminari_core.documents.pages import picture_of
from kaminari_core.errors import DocumentError, ImageError, UsageError
from kaminari_core.images import open_picture
from tests.documents.files import ENCRYPTION, drawn_pdf, encode, pdf, sheet

CONFIG = EngineConfig()
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def colour(image: Image.Image) -> tuple[int, ...]:
    """The colour in the middle, rounded to what lossy formats keep."""
    return tuple(255 * (value > 127) for value in image.getpixel((image.width // 2, image.height // 2)))  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF", "TIFF"])
def test_a_picture_is_one_page_and_its_own_file(kind: str) -> None:
    frames = {"save_all": True, "append_images": [Image.new("RGB", (20, 10), BLUE)]} if kind == "GIF" else {}
    data = encode(Image.new("RGB", (20, 10), RED), kind, **frames)
    document = open_document(data, "file", CONFIG)
    assert (document.format.upper(), document.pages) == (kind, 1)
    page = document.sheet(1)
    assert (page.image.size, colour(page.image)) == ((20, 10), RED)
    assert page.encoded() is data
    assert picture_of(page, document, 1).source is None


def test_heic() -> None:
    buffer = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (64, 32), RED)).save(buffer, quality=90)
    assert colour(open_document(buffer.getvalue(), "file", CONFIG).sheet(1).image) == RED


def test_a_turned_photo_is_upright() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    page = open_document(encode(Image.new("RGB", (20, 10), RED), "JPEG", exif=exif), "file", CONFIG).sheet(1)
    assert (page.image.size, page.decoded, page.rotation) == ((10, 20), (20, 10), "90")


def test_every_page_of_a_tiff() -> None:
    pages = [Image.new("RGB", (20, 10 + index), shade) for index, shade in enumerate((RED, GREEN, BLUE))]
    data = encode(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    document = open_document(data, "file", CONFIG)
    assert document.pages == 3
    for number, shade in enumerate((RED, GREEN, BLUE), 1):
        page = document.sheet(number)
        assert (page.image.size, colour(page.image)) == ((20, 9 + number), shade)
        part = picture_of(page, document, number)
        assert part.source is not None
        assert (part.source.page, part.source.pages, part.name) == (number, 3, f"file, page {number}")
        assert colour(open_picture(part.data, "x", CONFIG).image) == shade


def test_a_smaller_copy_in_a_tiff_is_no_page() -> None:
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    directory[254] = 1
    small = Image.new("RGB", (10, 5), BLUE)
    small.encoderinfo = {"tiffinfo": directory}
    data = encode(Image.new("RGB", (20, 10), RED), "TIFF", save_all=True, append_images=[small])
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.n_frames == 2  # type: ignore[attr-defined]
    assert open_document(data, "file", CONFIG).pages == 1


def test_a_tiff_whose_second_page_is_too_large_keeps_the_first() -> None:
    pages = [Image.new("L", (20, 10)), Image.new("L", (90, 90))]
    data = encode(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    document = open_document(data, "file", EngineConfig(max_image_pixels=1000))
    assert document.sheet(1).image.size == (20, 10)
    with pytest.raises(ImageError, match="90 x 90"):
        document.sheet(2)


def test_pdf_pages_are_drawn_at_the_dpi() -> None:
    data = pdf(sheet("one"), sheet("two"), sheet())
    document = open_document(data, "file", CONFIG, dpi=72)
    assert (document.format, document.pages) == ("PDF", 3)
    assert np.asarray(document.sheet(2).image).mean() == pytest.approx(np.asarray(sheet("two")).mean(), abs=1)
    assert open_document(data, "file", CONFIG, dpi=144).sheet(1).image.size == (400, 80)
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda number: document.sheet(number % 3 + 1).image.tobytes(), range(12)))
    assert drawn == drawn[:3] * 4


def test_a_pdf_is_drawn_upright_on_white_with_what_is_filled_in() -> None:
    black = "0 0 50 100 re f"
    page = open_document(drawn_pdf(content=black, page="/Rotate 90"), "file", CONFIG, dpi=72).sheet(1).image
    assert page.size == (100, 200)
    assert (page.getpixel((50, 10)), page.getpixel((50, 190))) == ((0, 0, 0), (255, 255, 255))


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"", "unsupported_document_format", "is empty; accepted are JPEG, PNG, .*PDF"),
        (b"hello", "unsupported_document_format", "no known kind; accepted are"),
        (b"<svg/>", "unsupported_document_format", "SVG; accepted are"),
        (b"%PDF-1.7\n", "damaged_document", "damaged"),
        (pdf(sheet())[:500], "damaged_document", "damaged"),
        (drawn_pdf(trailer=ENCRYPTION), "encrypted_document", "encrypted with a password"),
        (b"\x89PNG\r\n\x1a\n", "invalid_image", "damaged"),
        (b"II*\0\x08\0\0\0", "invalid_image", "damaged"),
    ],
    ids="empty text svg pdf-head pdf-cut pdf-encrypted png tiff".split(),
)
def test_what_is_no_document_is_named(data: bytes, code: str, words: str) -> None:
    with pytest.raises((DocumentError, ImageError), match=rf"^file: .*{words}") as caught:
        open_document(data, "file", CONFIG)
    assert (caught.value.param, caught.value.code) == ("file", code)


def test_one_broken_page_of_a_pdf_leaves_the_others() -> None:
    document = open_document(pdf(sheet("one"), sheet("two"), sheet("three"), broken=[2]), "file", CONFIG, dpi=72)
    assert document.pages == 3
    assert document.sheet(1).image.size == document.sheet(3).image.size == (200, 40)
    with pytest.raises(DocumentError, match="this page of the PDF file is damaged") as caught:
        document.sheet(2)
    assert caught.value.code == "damaged_page"


def test_pages_beyond_the_limit_are_refused_before_they_are_drawn() -> None:
    # 140 inches a side, the most that the format allows: at 2,400 dpi that would be 340 GB.
    document = open_document(drawn_pdf("0 0 10080 10080"), "file", CONFIG, dpi=2400)
    with pytest.raises(DocumentError, match=r"336000 x 336000 pixels, more than the 64,000,000 .*fewer dpi") as caught:
        document.sheet(1)
    assert caught.value.code == "image_too_large"
    with pytest.raises(ImageError, match="100 x 100"):
        open_document(encode(Image.new("L", (100, 100))), "file", EngineConfig(max_image_pixels=9999))
    with pytest.raises(DocumentError, match="dpi is 5"):
        open_document(drawn_pdf(), "file", CONFIG, dpi=5)


def test_a_huge_picture_inside_a_small_page_is_refused() -> None:
    page = "/Resources << /XObject << /P 5 0 R >> >>"
    picture = (
        "<< /Type /XObject /Subtype /Image /Width {0} /Height {0} /BitsPerComponent 8 /ColorSpace /DeviceGray /Length 100 >>\n"
        f"stream\n{'x' * 100}\nendstream"
    )
    content = "q 100 0 0 100 0 0 cm /P Do Q"
    for side, allowed in ((10, True), (50_000, False)):
        document = open_document(drawn_pdf("0 0 200 100", page, "", content, picture.format(side)), "file", CONFIG)
        if allowed:
            assert document.sheet(1).image.getextrema()[0][0] == ord("x")
        else:
            with pytest.raises(DocumentError, match="50000 x 50000 pixels") as caught:
                document.sheet(1)
            assert caught.value.code == "image_too_large"


def test_a_scan_that_cannot_be_decoded_is_no_empty_page() -> None:
    """pdfium draws such a page white and reports nothing."""
    page, content = "/Resources << /XObject << /P 5 0 R >> >>", "q 200 0 0 100 0 0 cm /P Do Q"
    head = "<< /Type /XObject /Subtype /Image /Width 10 /Height 10 /BitsPerComponent 8 /ColorSpace /DeviceGray"
    damaged = f"{head} /Filter /DCTDecode /Length 50 >>\nstream\n{'x' * 50}\nendstream"
    with pytest.raises(DocumentError) as caught:
        open_document(drawn_pdf("0 0 200 100", page, "", content, damaged), "file", CONFIG).sheet(1)
    assert caught.value.code == "damaged_page"
    white = f"{head} /Filter /ASCIIHexDecode /Length 201 >>\nstream\n{'ff' * 100}>\nendstream"
    sheet = open_document(drawn_pdf("0 0 200 100", page, "", content, white), "file", CONFIG).sheet(1)
    assert sheet.image.getextrema() == ((255, 255),) * 3


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(UsageError, match=r"pip install 'kaminari-core\[pdf\]'"):
        open_document(drawn_pdf(), "file", CONFIG)
    with pytest.raises(DocumentError, match=r"and PDF \(with the extra kaminari-core\[pdf\]\)"):
        open_document(b"text", "file", CONFIG)
