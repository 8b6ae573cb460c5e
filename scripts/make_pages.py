"""Seeded generator of printed lines and receipts with their truths.

Every picture is grey (`uint8`, height x width) and comes with its text and the centre of every printed character, so that
a trainer can be told where each character stands.

Truth convention: a line is its words joined by single spaces, however wide the gap between two columns is printed; lines
are stripped and joined by a newline; nothing is printed that is not in the truth.

A word is held out when its SHA-1 falls in a fixed tenth (`is_held_out`): training draws words outside that tenth only,
evaluation inside it only, so no evaluated word was ever trained on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

FONTS = Path("/usr/share/fonts/truetype/dejavu")
FACES = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSansCondensed", "DejaVuSansMono-Bold")
SIZES = range(16, 23)
MARGIN = (3, 10)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
PUNCTUATION = ".,:;-/+*%#&()'\"$@!?=_<>[]|"
CHARACTERS = LETTERS + DIGITS + PUNCTUATION

_WORDS = (
    "milk bread butter cheese eggs apple banana orange lemon tomato potato onion garlic carrot pepper rice pasta flour "
    "sugar salt coffee tea juice water beer wine soda cake cookie biscuit chocolate yogurt cream ham bacon chicken beef "
    "fish tuna salmon soup sauce honey jam cereal oats beans peas corn salad olive oil vinegar soap shampoo paper towel "
    "battery candle pen pencil notebook card bag box bottle can pack large small medium fresh organic whole half slice "
    "green red white black blue brown dark light sweet hot cold frozen dried daily family value extra store market shop "
    "street road avenue lane city open thank you visit again please keep receipt order table guest server cashier total "
    "subtotal cash change balance discount tax member points saved items price each phone date time invoice customer"
).split()
_ONSETS = "b c d f g h j k l m n p r s t v w y z br ch cl cr dr fl gr pl pr sh sl st th tr qu x".split()
_VOWELS = "a e i o u ai ea ee io oa oo ou y".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "d", "ng", "st", "nt", "lk", "sp", "b", "f", "z", "w"]


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


def is_held_out(word: str) -> bool:
    """Say whether a word belongs to the tenth that is never trained on; letter case does not matter."""
    return hashlib.sha1(word.lower().encode()).digest()[0] % 10 == 0


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


class Words:
    """Draws words of one side of the hold-out: shop words, invented words, numbers and codes."""

    def __init__(self, random: np.random.Generator, held_out: bool) -> None:
        self.random = random
        self.held_out = held_out
        self.known = [word for word in _WORDS if is_held_out(word) == held_out]

    def pick(self, choices: list[str] | str) -> str:
        """Draw one of several strings, or one character of a string."""
        return choices[int(self.random.integers(len(choices)))]

    def digits(self, count: int) -> str:
        """Draw a string of digits."""
        return "".join(self.pick(DIGITS) for _ in range(count))

    def invented(self) -> str:
        """Draw an invented word of one to three syllables that falls on the right side of the hold-out."""
        while True:
            count = int(self.random.choice([1, 2, 2, 2, 3, 3]))
            word = "".join(self.pick(_ONSETS) + self.pick(_VOWELS) + self.pick(_CODAS) for _ in range(count))
            if len(word) > 2 and is_held_out(word) == self.held_out:
                return word

    def word(self) -> str:
        """Draw a word in one of three letter cases."""
        word = self.pick(self.known) if self.random.random() < 0.35 else self.invented()
        case = self.random.random()
        return word if case < 0.4 else word.capitalize() if case < 0.75 else word.upper()

    def price(self) -> str:
        """Draw an amount, sometimes with a sign."""
        amount = f"{int(self.random.integers(0, self.pick_int(10, 100, 1000)))}.{self.digits(2)}"
        sign = self.pick(["", "", "", "", "$", "-"])
        return sign + amount

    def pick_int(self, *choices: int) -> int:
        """Draw one of several numbers."""
        return choices[int(self.random.integers(len(choices)))]

    def date(self) -> str:
        """Draw a date in one of four notations."""
        day, month = f"{self.random.integers(1, 32):02d}", f"{self.random.integers(1, 13):02d}"
        year = str(int(self.random.integers(1990, 2040)))
        notations = [
            f"{year}-{month}-{day}",
            f"{day}/{month}/{year}",
            f"{day}.{month}.{year[2:]}",
            f"{month}/{day}/{year[2:]}",
        ]
        return self.pick(notations)

    def time(self) -> str:
        """Draw a time of day, with seconds now and then."""
        clock = f"{self.random.integers(0, 24):02d}:{self.random.integers(0, 60):02d}"
        return clock + (f":{self.random.integers(0, 60):02d}" if self.random.random() < 0.3 else "")

    def name(self, most: int = 3) -> str:
        """Draw one to `most` words."""
        return " ".join(self.word() for _ in range(int(self.random.integers(1, most + 1))))

    def columns(self) -> tuple[str, str]:
        """Draw an entry and its amount: what a receipt prints left and right."""
        entry = self.pick(["item", "item", "item", "count", "count", "label", "percent", "weight"])
        if entry == "count":
            return f"{self.random.integers(1, 20)} x {self.name(2)}", self.price()
        if entry == "label":
            label = self.word() + self.pick(["", ":", ""])
            return label, self.pick([self.price(), self.digits(int(self.random.integers(1, 5)))])
        if entry == "percent":
            return f"{self.word()} {self.random.integers(1, 100)}%", self.price()
        if entry == "weight":
            return (
                f"{self.name(1)} {self.random.integers(1, 1000)}{self.pick(['g', 'ml', 'kg', 'L', 'oz'])}",
                self.price(),
            )
        return self.name(3), self.price() + self.pick(["", "", "", " A", " B", "*"])

    def single(self) -> str:
        """Draw a receipt line without columns: a heading, date, phone number, address, code or note."""
        kind = int(self.random.integers(9))
        if kind == 0:
            return f"{self.date()} {self.time()}"
        if kind == 1:
            return self.pick(["Tel: ", "Tel. ", "Phone: ", "", "+"]) + " ".join(
                self.digits(int(self.random.integers(2, 5))) for _ in range(3)
            )
        if kind == 2:
            return f"{self.random.integers(1, 999)} {self.name(2)}"
        if kind == 3:
            return (
                f"{self.word()} {self.pick(['#', 'No. ', 'No: ', '# '])}{self.digits(int(self.random.integers(2, 8)))}"
            )
        if kind == 4:
            return f"{self.word()}: {self.pick([self.date(), self.time(), self.word(), self.digits(4)])}"
        if kind == 5:
            return f"www.{self.word().lower()}.{self.pick(['com', 'org', 'net', 'shop'])}"
        if kind == 6:
            return f"{self.name(3)}{self.pick(['!', '.', '?', ','])}"
        if kind == 7:
            first, second, third = (self.pick(LETTERS[26:]) for _ in range(3))
            return f"{first}{self.digits(2)}-{self.digits(3)}/{second}{third}"
        return self.name(4)

    def line(self) -> str:
        """Draw the text of a line on its own."""
        return " ".join(self.columns()) if self.random.random() < 0.5 else self.single()

    def scramble(self, most: int = 16) -> str:
        """Draw a string of random characters with a rare space."""
        count = int(self.random.integers(1, most + 1))
        text = "".join(" " if self.random.random() < 0.07 else self.pick(CHARACTERS) for _ in range(count))
        return " ".join(text.split()) or self.pick(CHARACTERS)


def text_width(text: str, style: Style) -> float:
    """Give the printed width of a text in pixels."""
    return sum(_advance(style.face, style.size, character) for character in text)


def _print_text(draw: ImageDraw.ImageDraw, text: str, x: float, baseline: float, style: Style) -> NDArray[np.float32]:
    """Print a text at a sub-pixel place and give the centres of its characters."""
    draw.text((x, baseline), text, fill=style.ink, font=font(style.face, style.size), anchor="ls")
    edges = x + np.cumsum([0.0] + [_advance(style.face, style.size, character) for character in text])
    centres = np.empty((len(text), 2), np.float32)
    centres[:, 0] = (edges[:-1] + edges[1:]) / 2
    centres[:, 1] = baseline - 0.35 * style.size
    centres[[character == " " for character in text]] = np.nan
    return centres


def _finish(image: Image.Image, style: Style, random: np.random.Generator) -> NDArray[np.uint8]:
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
    centres = _print_text(ImageDraw.Draw(image), text, left, above + 0.85 * ascent, style)
    return Picture(_finish(image, style, random), text, centres)


def _fit(text: str, width: float, style: Style) -> str:
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
        centres += [gap] * (index > 0) + [_print_text(draw, row.left, start, baseline, style)]
        if row.right:
            start = width - margin - text_width(row.right, style)
            centres += [gap, _print_text(draw, row.right, start, baseline, style)]
    text = "\n".join(f"{row.left} {row.right}" if row.right else row.left for row in rows)
    return Picture(_finish(image, style, random), text, np.concatenate(centres))


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
            rows.append(Row(_fit(words.scramble(), room, style), place=words.pick(["left", "right"])))
        elif random.random() < 0.6:
            left, right = words.columns()
            left = _fit(left, room - text_width(right, style) - style.size * 0.6, style)
            rows.append(Row(left, right) if left else Row(_fit(right, room, style), place="right"))
        else:
            rows.append(Row(_fit(words.single(), room, style), place=words.pick(["left", "left", "middle"])))
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


def write_lines(folder: Path, lines: int, scrambles: int, seed: int) -> None:
    """Write held-out single lines as grey PNG files, with `truths.json`: file name to text."""
    random = np.random.default_rng(seed)
    words = Words(random, held_out=True)
    truths: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for kind, count in (("line", lines), ("random", scrambles)):
        for index in range(count):
            picture = draw_line(words.line() if kind == "line" else words.scramble(), draw_style(random), random)
            truths[f"{kind}-{index:02d}.png"] = picture.text
            Image.fromarray(picture.pixels).save(folder / f"{kind}-{index:02d}.png", optimize=True)
    (folder / "truths.json").write_text(json.dumps(truths, indent=1) + "\n")


def main() -> None:
    """Write the held-out lines that tests read and the receipt that the documentation shows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=Path, default=Path("tests/qwen3vl/data/lines"))
    parser.add_argument("--receipt", type=Path, default=Path("assets/receipt.png"))
    parser.add_argument("--seed", type=int, default=2026)
    options = parser.parse_args()
    write_lines(options.lines, 60, 30, options.seed)
    options.receipt.parent.mkdir(parents=True, exist_ok=True)
    receipt = sample_receipt()
    Image.fromarray(receipt.pixels).save(options.receipt, optimize=True)
    options.receipt.with_suffix(".txt").write_text(receipt.text + "\n")


if __name__ == "__main__":
    main()
