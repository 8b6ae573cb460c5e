"""Pages of the kinds that documents come in: receipts, forms, tables, text, and receipts twelve times as tall as wide.

The text of a page follows the convention of `drawing`. A row of a table is a line of it, its cells joined by single spaces;
`tables` hold the same cells as HTML. A field is printed as a line `Label: value`, the two set apart or not.

Lines stand 32 px apart, a visual token of Qwen3-VL, unless asked otherwise.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pages.drawing import (
    MARGIN,
    Picture,
    Row,
    Style,
    draw_line,
    draw_rows,
    draw_style,
    finish,
    fit,
    font,
    print_text,
    text_width,
)
from pages.words import Words

PITCH = 32.0


@dataclass(frozen=True)
class Page:
    """A printed page with all that is known of it: its picture and text, its fields by label, its tables as HTML."""

    kind: str
    picture: Picture
    fields: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[str, ...] = ()


def draw_receipt_page(words: Words, style: Style, random: np.random.Generator, entries: int = 4) -> Page:
    """Print a receipt whose amounts add up: shop, date, entries and total; date and total are its fields."""
    width = int(random.integers(224, 257))
    room = width - 2 * MARGIN[1]
    rows = [Row(fit(words.name(2), room, style), place="middle")]
    fields = {"Date": words.date()}
    rows.append(Row(f"Date: {fields['Date']}"))
    total = 0
    for _ in range(entries):
        cents = int(random.integers(5, 5000))
        total += cents
        amount = _money(cents)
        left = fit(words.name(2), room - text_width(amount, style) - style.size, style)
        rows.append(Row(left, amount))
    fields["Total"] = _money(total)
    rows.append(Row("Total:", fields["Total"]))
    return Page("receipt", draw_rows(rows, style, random, width, PITCH), fields)


def draw_tall_receipt(words: Words, style: Style, random: np.random.Generator) -> Page:
    """Print a receipt of fourteen entries, about two and a half times as tall as wide."""
    return replace(draw_receipt_page(words, style, random, entries=14), kind="tall")


def draw_form(words: Words, style: Style, random: np.random.Generator, count: int = 5) -> Page:
    """Print a form: a heading and `count` fields, no two of one label."""
    width = int(random.integers(256, 289))
    room = width - 2 * MARGIN[1]
    rows, fields = [Row(fit(words.name(2), room, style), place="middle")], dict[str, str]()
    while len(fields) < count:
        label = words.word().capitalize()
        value = words.pick([words.date(), words.time(), words.name(2), words.price(), words.digits(5)])
        if label not in fields and text_width(f"{label}: {value}", style) <= room - style.size:
            fields[label] = value
            apart = random.random() < 0.5
            rows.append(Row(f"{label}:", value) if apart else Row(f"{label}: {value}"))
    return Page("form", draw_rows(rows, style, random, width, PITCH), fields)


def draw_text(words: Words, style: Style, random: np.random.Generator, lines: int = 6) -> Page:
    """Print lines of running text, each filled with words."""
    width = int(random.integers(224, 257))
    rows = [Row(fit(" ".join(words.word() for _ in range(8)), width - 2 * MARGIN[1], style)) for _ in range(lines)]
    return Page("text", draw_rows(rows, style, random, width, PITCH))


def draw_table(
    words: Words, style: Style, random: np.random.Generator, rows: int = 5, columns: int = 3, *, ruled: bool = False
) -> Page:
    """Print a table: a head, entries with whole numbers, and a sum whose label spans all columns but the last.

    The first column is set left, the others right. `ruled` draws lines between cells.
    """
    width = int(random.integers(256, 289))
    step = (width - 2 * MARGIN[1]) * 0.6 / (columns - 1)
    first, other = width - 2 * MARGIN[1] - step * (columns - 1) - style.size / 2, step - style.size / 2
    head = [fit(words.word().capitalize(), first if column == 0 else other, style) for column in range(columns)]
    body, total = [head], 0
    for _ in range(rows - 2):
        numbers = random.integers(1, 100, columns - 1)
        total += int(numbers[-1])
        body.append([fit(words.word(), first, style), *map(str, numbers.tolist())])
    body.append([fit("Sum", first, style), str(total)])
    picture = _print_cells(body, style, random, width, step, columns, ruled)
    return Page("table", picture, tables=(_as_html(body, columns),))


def draw_long_receipt(
    words: Words, style: Style, random: np.random.Generator, ratio: float = 12.0, width: int = 224, repeats: int = 0
) -> Page:
    """Print a receipt about `ratio` times as tall as wide, in lines with blank paper between them, no two of them equal.

    Then `repeats` of its rows, drawn at random, are printed once more right below themselves: true repetitions, which must not be
    taken for a fault of reading.
    """
    room = width - 2 * MARGIN[1]
    rows = [Row("Receipt", place="middle")]
    seen = {"Receipt"}
    count = round(ratio * width / PITCH)
    while len(rows) < count - repeats:
        amount = words.price()
        row = Row(fit(words.name(2), room - text_width(amount, style) - style.size, style), amount)
        if random.random() < 0.2:
            row = Row(fit(words.single(), room, style))
        line = f"{row.left} {row.right}".strip()
        if row.left and line not in seen:
            seen.add(line)
            rows.append(row)
    for place in sorted(random.choice(np.arange(1, len(rows)), repeats, replace=False).tolist(), reverse=True):
        rows.insert(place, rows[place])
    return Page("long", draw_rows(rows, style, random, width, PITCH))


def draw_single_line(words: Words, style: Style, random: np.random.Generator) -> Page:
    """Print one line of a receipt."""
    return Page("line", draw_line(words.line(), style, random))


def draw_blank(words: Words, style: Style, random: np.random.Generator) -> Page:
    """Give paper on which nothing is printed, with its noise."""
    shape = int(random.integers(160, 257)), int(random.integers(160, 257))
    empty = Image.new("L", shape, style.paper)
    return Page("blank", Picture(finish(empty, style, random), "", np.empty((0, 2), np.float32)))


KINDS: Final[Mapping[str, Callable[[Words, Style, np.random.Generator], Page]]] = MappingProxyType(
    {
        "line": draw_single_line,
        "receipt": draw_receipt_page,
        "form": draw_form,
        "table": draw_table,
        "text": draw_text,
        "long": draw_long_receipt,
        "blank": draw_blank,
        "tall": draw_tall_receipt,
    }
)


def draw_page(kind: str, seed: int | Sequence[int], *, held_out: bool = True) -> Page:
    """Draw a page of one of `KINDS`; equal seeds give equal pages. Its words are those of one side of the hold-out."""
    random = np.random.default_rng(seed)
    return KINDS[kind](Words(random, held_out=held_out), draw_style(random), random)


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def _as_html(rows: Sequence[Sequence[str]], columns: int) -> str:
    """A table whose first row is its head; the label of a row with two cells spans all columns but the last."""
    lines = []
    for number, row in enumerate(rows):
        cell = "td" if number else "th"
        span = f' colspan="{columns - 1}"' if len(row) == 2 and columns > 2 else ""
        first, *others = (html.escape(text, quote=False) for text in row)
        cells = f"<{cell}{span}>{first}</{cell}>" + "".join(f"<{cell}>{text}</{cell}>" for text in others)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _print_cells(
    rows: Sequence[Sequence[str]],
    style: Style,
    random: np.random.Generator,
    width: int,
    step: float,
    columns: int,
    ruled: bool,
) -> Picture:
    """Print cells whose columns, but for the first, end `step` px apart; the last cell of a row is always in the last column."""
    ascent, descent = font(style.face, style.size).getmetrics()
    first = float(random.uniform(1, 8)) + 0.85 * ascent
    height = int(np.ceil(first + PITCH * (len(rows) - 1) + descent + random.uniform(1, 8)))
    image = Image.new("L", (width, height), style.paper)
    draw = ImageDraw.Draw(image)
    gap = np.full((1, 2), np.nan, np.float32)
    centres: list[NDArray[np.float32]] = []
    right = width - MARGIN[1]
    for number, row in enumerate(rows):
        for column, text in enumerate(row):
            end = right - (len(row) - 1 - column) * step
            start = MARGIN[1] if column == 0 else end - text_width(text, style)
            centres += [gap] * bool(number or column)
            centres.append(print_text(draw, text, start, first + number * PITCH, style))
    if ruled:
        for number in range(len(rows) - 1):
            below = first + (number + 0.5) * PITCH - 0.35 * style.size
            draw.line((MARGIN[0], below, width - MARGIN[0], below), fill=style.ink)
        for column in range(1, columns):
            aside = right - (columns - column) * step + 3
            draw.line((aside, 1, aside, height - 2), fill=style.ink)
    text = "\n".join(" ".join(row) for row in rows)
    return Picture(finish(image, style, random), text, np.concatenate(centres))
