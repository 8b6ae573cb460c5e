"""The texts of a page's pieces -> one text, with every line once.

Pieces that were cut between lines are put one below the other. Pieces that share rows were cut through print: the last line of
the upper one and the first of the lower one may be halves, and what lies between them was read twice, perhaps not twice alike. So
the lines at the end of one and at the beginning of the other are aligned by likeness, and each is taken from the piece in
which it is whole. Where no lines are alike nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

ALIKE: Final = 0.6
"""The least likeness (2 * common characters / all characters) of two readings of one line."""
HALVES: Final = 2
"""Lines at a cut that may be halves; more than one where the page is skewed."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a page: its text, the number of the piece that it was taken from, and which line of that piece's text it is."""

    text: str
    piece: int = 0
    index: int = 0


def join_pieces(texts: Sequence[str], shared: Sequence[float]) -> list[Line]:
    """The lines of a page from the texts of its pieces; `shared` is the part of each piece that the one before shows as well.

    Empty lines at the ends of pieces are left out.
    """
    lines: list[Line] = []
    for piece, (text, part) in enumerate(zip(texts, shared, strict=True)):
        first = len(text) - len(text.lstrip("\n"))
        rows = enumerate(text.strip("\n").split("\n"), first)
        below = [Line(row, piece, index) for index, row in rows] if text.strip("\n") else []
        lines = join_lines(lines, below, round(part * len(below))) if part else lines + below
    return lines


def join_lines(above: list[Line], below: list[Line], expected: int) -> list[Line]:
    """Join the lines of two pieces that share about `expected` lines."""
    best, found = 0.0, (0, 0, 0)
    longest = min(len(above), len(below), 2 * expected + HALVES)
    alike = {
        (index, other): likeness(above[len(above) - 1 - index].text, below[other].text)
        for index in range(min(len(above), longest + HALVES))
        for other in range(min(len(below), longest + HALVES))
    }
    for ended in range(min(HALVES + 1, len(above))):
        for begun in range(min(HALVES + 1, len(below))):
            for count in range(1, min(longest, len(above) - ended, len(below) - begun) + 1):
                pairs = [alike[ended + count - 1 - step, begun + step] for step in range(count)]
                # A longer overlap with the same likeness is likelier; lines that are dropped speak against it.
                score = sum(pair - ALIKE for pair in pairs) - 0.1 * (ended + begun) - 0.02 * abs(count + 1 - expected)
                if min(pairs) >= ALIKE and score > best:
                    best, found = score, (ended, begun, count)
    ended, begun, count = found
    if not count:
        return above + below
    # Of what was read twice each piece gives the half that is farther from its own end.
    start, half = len(above) - ended - count, count // 2
    middle = max(above[start + half], below[begun + half], key=lambda line: len(line.text))
    return [*above[: start + half], middle, *below[begun + half + 1 :]]


def likeness(first: str, second: str) -> float:
    """How alike two lines are, 0 to 1, however they are spaced."""
    return SequenceMatcher(None, "".join(first.split()), "".join(second.split()), autojunk=False).ratio()
