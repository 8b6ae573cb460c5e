"""Files for the tests: pictures, and PDF files with whatever is wrong with them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from scripts.pages.drawing import font


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def sheet(text: str = "", size: tuple[int, int] = (200, 40), *, ink: int = 20, height: int = 18) -> Image.Image:
    """White paper with a line of print."""
    image = Image.new("L", size, 250)
    if text:
        ImageDraw.Draw(image).text((6, 8), text, fill=ink, font=font("DejaVuSans", height))
    return image


def noisy(image: Image.Image, deviation: float, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).normal(0, deviation, (image.height, image.width))
    return Image.fromarray(np.clip(np.asarray(image.convert("L")) + noise, 0, 255).astype(np.uint8)).convert("RGB")


def pdf(*pages: Image.Image, broken: Sequence[int] = ()) -> bytes:
    """A PDF of pictures, one dot to a point, in which the objects of the `broken` pages (from 1) are no pages."""
    data = encode(pages[0].convert("RGB"), "PDF", save_all=True, append_images=[p.convert("RGB") for p in pages[1:]])
    parts = data.split(b"/Type /Page\n")
    assert len(parts) == len(pages) + 1
    kinds = [b"/Type /Pony\n" if number in broken else b"/Type /Page\n" for number in range(1, len(parts))]
    return b"".join([parts[0], *(kind + part for kind, part in zip(kinds, parts[1:], strict=True))])


def drawn_pdf(
    media_box: str = "0 0 200 100", page: str = "", trailer: str = "", content: str = "", *more: str
) -> bytes:
    """A PDF of one page, written by hand."""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [{media_box}] /Contents 4 0 R {page} >>",
        f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        *more,
    ]
    made, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(made))
        made += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    start, size = len(made), len(objects) + 1
    made += f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n"
    made += f"<< /Size {size} /Root 1 0 R {trailer} >>\nstartxref\n{start}\n%%EOF\n"
    return made.encode()


ENCRYPTION = (
    "/Encrypt << /Filter /Standard /V 1 /R 2 /Length 40 /P -4 "
    f"/O <{'ab' * 32}> /U <{'cd' * 32}> >> /ID [<{'00' * 16}> <{'00' * 16}>]"
)
"""Entries of a trailer that say that a password is needed, which nobody has."""
