"""Blank paper is blank whatever its noise, and nothing that could be read is."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from kaminari_core.documents.blank import BAND, is_blank
from scripts.pages.drawing import FACES, font
from scripts.pages.kinds import draw_page
from tests.documents.files import encode, noisy, sheet

SIZE = (400, 300)


def paper(shade: str = "even") -> Image.Image:
    """Paper without print: even, in a shadow that falls from one side, or dark towards its corners."""
    x, y = np.meshgrid(np.linspace(0, 1, SIZE[0]), np.linspace(0, 1, SIZE[1]))
    dark = {"even": 0 * x, "shadow": 60 * (x + y), "corners": 160 * ((x - 0.5) ** 2 + (y - 0.5) ** 2)}[shade]
    return Image.fromarray((250 - dark).astype(np.uint8))


@pytest.mark.parametrize("shade", ["even", "shadow", "corners"])
@pytest.mark.parametrize("noise", [0, 2, 5, 10])
def test_paper_is_blank(shade: str, noise: float) -> None:
    image = noisy(paper(shade), noise)
    assert is_blank(image)
    for quality in (95, 75, 50):
        assert is_blank(Image.open(io.BytesIO(encode(image, "JPEG", quality=quality))).convert("RGB"))


@pytest.mark.parametrize("colour", ["white", "black", "#f5e6c8", "red"])
def test_paper_of_any_colour_is_blank(colour: str) -> None:
    assert is_blank(Image.new("RGB", (300, 200), colour))
    assert is_blank(Image.new("RGB", (1, 1), colour))


@pytest.mark.parametrize("seed", range(10))
def test_the_generators_blank_pages_are_blank_and_its_lines_are_not(seed: int) -> None:
    assert is_blank(Image.fromarray(draw_page("blank", seed).picture.pixels).convert("RGB"))
    assert not is_blank(Image.fromarray(draw_page("line", seed).picture.pixels).convert("RGB"))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("ink", "noise"), [(50, 0), (50, 5), (150, 0), (190, 0)])
def test_a_single_sign_is_not_blank(face: str, ink: int, noise: float) -> None:
    for text, size in ((".", 14), ("-", 14), ("l", 10), ("one thin line of text", 10)):
        image = Image.new("L", SIZE, 250)
        ImageDraw.Draw(image).text((200.3, 151.7), text, fill=ink, font=font(face, size))
        assert not is_blank(noisy(image, noise)), text


@pytest.mark.parametrize("contrast", [200, 80, 40])
@pytest.mark.parametrize("rows", [1, 8])
def test_dense_print_without_margins_is_not_blank_however_faint(contrast: int, rows: int) -> None:
    """There is no quiet place here to tell the noise of the paper by."""
    for face in FACES:
        for size in (12, 22):
            letters = font(face, size)
            image = Image.new("L", (300, int(size * 1.15 * rows)), 240)
            for row in range(rows):
                words = "lorem ipsum dolor sit amet consectetur " * 3
                ImageDraw.Draw(image).text((0, row * size * 1.15 - 1), words, fill=240 - contrast, font=letters)
            for noise in (0, 6):
                assert not is_blank(noisy(image, noise)), (face, size, noise)


def test_print_of_the_same_lightness_and_on_the_border_of_bands_is_not_blank() -> None:
    image = Image.new("RGB", SIZE, (120, 120, 120))
    ImageDraw.Draw(image).text((50, 50), "coloured", fill=(200, 60, 150), font=font(FACES[0], 16))
    assert not is_blank(image)
    for row in range(BAND - 3, BAND + 3):
        tall = Image.new("RGB", (100, BAND + 50), "white")
        tall.paste((150, 150, 150), (50, row, 52, row + 2))
        assert not is_blank(tall), row


def test_white_print_on_black_is_not_blank() -> None:
    assert not is_blank(sheet("text").convert("RGB").point(lambda value: 255 - value))
