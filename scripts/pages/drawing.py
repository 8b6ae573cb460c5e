"""Printed lines and rows: text on paper, with the centre of every printed character.

Every picture is grey (`uint8`, height x width) and comes with its text and the centre of every printed character, so that
a trainer can be told where each character stands.

Truth convention: a line is its words joined by single spaces, however wide the gap between two columns is printed; lines
are stripped and joined by a newline; nothing is printed that is not in the truth.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from pages.words import Words

FONTS = Path("/usr/share/fonts/truetype/dejavu")
FACES = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSansCondensed", "DejaVuSansMono-Bold")
SIZES = range(16, 23)
MARGIN = (3, 10)


@dataclass(frozen=True)
class Picture:
    """A printed picture with its truth.

    `pixels` is (height, width) uint8; `text` the truth; `centres` (len(text), 2) float32, the x and y in pixels of each
    character of the truth, NaN for spaces and newlines.
    """

    pixels: NDArray[np.uint8]
    text: str
    centres: NDArray[np.float32]


@dataclass(frozen=True)
class Style:
    """How one picture is printed: face, size in pixels, ink and paper as grey levels, noise as a standard deviation."""

    face: str
    size: int
    ink: int
    paper: int
    noise: float


@dataclass(frozen=True)
class Row:
    """One row of a receipt: a text at a place (left, middle or right), or an entry left with its amount right."""

    left: str
    right: str = ""
    place: str = "left"


@functools.cache
def font(face: str, size: int) -> ImageFont.FreeTypeFont:
    """Load a DejaVu face at a size in pixels, without shaping so that characters stand where their advances put them."""
    return ImageFont.truetype(str(FONTS / f"{face}.ttf"), size, layout_engine=ImageFont.Layout.BASIC)


@functools.cache
def _advance(face: str, size: int, character: str) -> float:
    return font(face, size).getlength(character)


def draw_style(random: np.random.Generator) -> Style:
    """Draw a face, a size and grey levels."""
    return Style(
        face=FACES[random.integers(len(FACES))],
        size=int(random.integers(SIZES.start, SIZES.stop)),
        ink=int(random.integers(0, 90)),
        paper=int(random.integers(228, 256)),
        noise=float(random.choice([0.0, 0.0, 2.0, 5.0])),
    )


def text_width(text: str, style: Style) -> float:
    """Give the printed width of a text in pixels."""
    return sum(_advance(style.face, style.size, character) for character in text)


def print_text(draw: ImageDraw.ImageDraw, text: str, x: float, baseline: float, style: Style) -> NDArray[np.float32]:
    """Print a text at a sub-pixel place and give the centres of its characters."""
    draw.text((x, baseline), text, fill=style.ink, font=font(style.face, style.size), anchor="ls")
    edges = x + np.cumsum([0.0] + [_advance(style.face, style.size, character) for character in text])
    centres = np.empty((len(text), 2), np.float32)
    centres[:, 0] = (edges[:-1] + edges[1:]) / 2
    centres[:, 1] = baseline - 0.35 * style.size
    centres[[character == " " for character in text]] = np.nan
    return centres


def finish(image: Image.Image, style: Style, random: np.random.Generator) -> NDArray[np.uint8]:
    """Give the pixels of a picture, (height, width), with the noise of its style."""
    pixels = np.asarray(image)
    if style.noise:
        noisy = pixels + random.normal(0.0, style.noise, pixels.shape)
        pixels = np.clip(noisy, 0, 255).astype(np.uint8)
    return pixels


def draw_line(text: str, style: Style, random: np.random.Generator) -> Picture:
    """Print one line, cropped with random margins of up to 6 px aside and 4 px above and below."""
    left, right = random.uniform(1, 7, 2)
    above, below = random.uniform(0, 4, 2)
    ascent, descent = font(style.face, style.size).getmetrics()
    width = int(np.ceil(left + text_width(text, style) + right))
    height = int(np.ceil(above + 0.85 * ascent + descent + below))
    image = Image.new("L", (width, height), style.paper)
    centres = print_text(ImageDraw.Draw(image), text, left, above + 0.85 * ascent, style)
    return Picture(finish(image, style, random), text, centres)


def fit(text: str, width: float, style: Style) -> str:
    """Drop words, then characters, until a text is no wider than asked."""
    while text_width(text, style) > width and " " in text:
        text = text.rsplit(" ", 1)[0]
    while text and text_width(text, style) > width:
        text = text[:-1]
    return text


def draw_rows(
    rows: list[Row], style: Style, random: np.random.Generator, width: int, pitch: float, blank: float = 0.0
) -> Picture:
    """Print rows of text `width` px wide with `pitch` px from baseline to baseline, and margins of 3 to 10 px.

    Up to `blank` px more are left free above or below.
    """
    ascent, descent = font(style.face, style.size).getmetrics()
    margin = float(random.uniform(*MARGIN))
    above, below = random.uniform(0, blank) * np.eye(2)[random.integers(2)] if blank else (0.0, 0.0)
    first = float(random.uniform(1, 8) + above) + 0.85 * ascent
    height = int(np.ceil(first + pitch * (len(rows) - 1) + descent + random.uniform(0, 8) + below))
    image = Image.new("L", (width, height), style.paper)
    draw = ImageDraw.Draw(image)
    gap = np.full((1, 2), np.nan, np.float32)
    centres: list[NDArray[np.float32]] = []
    for index, row in enumerate(rows):
        baseline = first + index * pitch
        start = width - margin - text_width(row.left, style) if row.place == "right" else margin
        if row.place == "middle":
            start = (width - text_width(row.left, style)) / 2
        centres += [gap] * (index > 0) + [print_text(draw, row.left, start, baseline, style)]
        if row.right:
            start = width - margin - text_width(row.right, style)
            centres += [gap, print_text(draw, row.right, start, baseline, style)]
    text = "\n".join(f"{row.left} {row.right}" if row.right else row.left for row in rows)
    return Picture(finish(image, style, random), text, np.concatenate(centres))


def draw_receipt(
    words: Words,
    style: Style,
    random: np.random.Generator,
    count: int,
    width: int,
    pitch: float,
    scrambled: float = 0.0,
    blank: float = 0.0,
) -> Picture:
    """Print a receipt of `count` rows; `scrambled` is the share of rows that hold random characters instead of text."""
    room = width - 2 * MARGIN[1]
    rows: list[Row] = []
    for _ in range(count):
        if random.random() < scrambled:
            rows.append(Row(fit(words.scramble(), room, style), place=words.pick(["left", "right"])))
        elif random.random() < 0.6:
            left, right = words.columns()
            left = fit(left, room - text_width(right, style) - style.size * 0.6, style)
            rows.append(Row(left, right) if left else Row(fit(right, room, style), place="right"))
        else:
            rows.append(Row(fit(words.single(), room, style), place=words.pick(["left", "left", "middle"])))
    return draw_rows(rows, style, random, width, pitch, blank)


def sample_receipt() -> Picture:
    """Print the receipt that the documentation shows."""
    rows = [
        Row("THE CORNER SHOP", place="middle"),
        Row("27 Mill Lane", place="middle"),
        Row("Tel: 020 7946 0123", place="middle"),
        Row("2026-03-14 12:41"),
        Row("2 x Oat milk", "3.90"),
        Row("Rye bread", "2.75"),
        Row("Tomato soup", "1.80"),
        Row("Lemon cake", "4.25"),
        Row("SUBTOTAL", "12.70"),
        Row("VAT 20%", "2.54"),
        Row("TOTAL", "$15.24"),
        Row("Thank you!", place="middle"),
    ]
    return draw_rows(rows, Style("DejaVuSans", 18, 20, 250, 0.0), np.random.default_rng(3), 250, 32.0)
