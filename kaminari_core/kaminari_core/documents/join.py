"""The texts of a page's pieces -> one text, with every line once.

Pieces that were cut between lines are put one below the other. Pieces that share rows were cut through print: the last line of
the upper one and the first of the lower one may be halves, and what lies between them was read twice, perhaps not twice alike. So
the lines at the end of one and at the beginning of the other are aligned by likeness, and each is taken from the piece in
which it is whole. Where no lines are alike nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Final

ALIKE: Final = 0.6
"""The least likeness (2 * common characters / all characters) of two readings of one line."""
HALVES: Final = 2
"""Lines at a cut that may be halves; more than one where the page is skewed."""


def join_pieces(texts: Sequence[str], shared: Sequence[float]) -> str:
    """The text of a page from those of its pieces; `shared` is the part of each piece that the one before shows as well."""
    lines: list[str] = []
    for text, part in zip(texts, shared, strict=True):
        below = text.strip("\n").splitlines()
        lines = join_lines(lines, below, round(part * len(below))) if part else lines + below
    return "\n".join(lines)


def join_lines(above: list[str], below: list[str], expected: int) -> list[str]:
    """Join the lines of two pieces that share about `expected` lines."""
    best, found = 0.0, (0, 0, 0)
    longest = min(len(above), len(below), 2 * expected + HALVES)
    alike = {
        (index, other): likeness(above[len(above) - 1 - index], below[other])
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
    middle = max(above[start + half], below[begun + half], key=len)
    return [*above[: start + half], middle, *below[begun + half + 1 :]]


def likeness(first: str, second: str) -> float:
    """How alike two lines are, 0 to 1, however they are spaced."""
    return SequenceMatcher(None, "".join(first.split()), "".join(second.split()), autojunk=False).ratio()
