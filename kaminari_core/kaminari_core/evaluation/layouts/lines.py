"""Lines of text from boxes: sets that know words and where they stand, but no order of reading.

A box belongs to a line when its middle lies between the top and the bottom of the line's first box; lines are read from top to
bottom, boxes from left to right, with a space between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A text with the edges of its box in pixels."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


def box_around(text: str, points: Iterable[tuple[float, float]]) -> Box:
    """The upright box around points (x, y)."""
    across, down = zip(*points, strict=True)
    return Box(text, min(across), min(down), max(across), max(down))


def text_of(boxes: Iterable[Box]) -> str:
    """The text that the boxes hold, line by line."""
    lines: list[list[Box]] = []
    for box in sorted((box for box in boxes if box.text.strip()), key=lambda box: (box.top + box.bottom, box.left)):
        middle = (box.top + box.bottom) / 2
        line = next((line for line in lines if line[0].top <= middle <= line[0].bottom), None)
        if line is None:
            lines.append([box])
        else:
            line.append(box)
    return "\n".join(" ".join(box.text.strip() for box in sorted(line, key=lambda box: box.left)) for line in lines)
