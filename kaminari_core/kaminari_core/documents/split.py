"""Where a long page, such as a receipt, is cut so that each piece is seen without being shrunk.

    size of the page, budget of the model -> tallest_piece -> cut(image, tallest) -> Piece...

A page is long when it is at least LONG times as tall as wide and the model would see it shrunk. It is cut in a wide gap
between lines in the lower half of what one piece may hold. Where there is none (a skewed page, a dense drawing), the
piece is as tall as it may be, and the next one begins above its end, so that a line that is cut by one is whole in the other;
`join.py` then finds the lines that were read twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kaminari_core.config import EngineConfig
from kaminari_core.documents.ink import contrast, threshold
from kaminari_core.protocols import ModelShape
from kaminari_core.sizing import bucket

LONG: Final = 3.0
"""Height over width from which a page may be cut: more than two sheets of paper one above the other (A4: 2.83)."""
OVERLAP: Final = 0.25
"""The part of a piece that the next one shows again where there is no gap to cut in."""
BORDER: Final = 0.9
"""A column with ink in more than this part of the rows is the line of a frame and not print."""
TYPICAL: Final = 0.5
"""A gap must have this part of the usual height of gaps on this page: the two bars of an equals sign leave one as well."""

ABOUT: Final = 0.75


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `top` to `bottom` (the latter excluded) of an upright page; the first `shared` end the piece before as well."""

    top: int
    bottom: int
    shared: int = 0


def tallest_piece(width: int, height: int, shape: ModelShape, config: EngineConfig) -> int | None:
    """The rows that a piece of a page of this size may have, or None when the page is to be seen whole.

    A piece of full width is as tall as it can be without being shrunk, but at least as tall as wide, however wide that is.
    """
    if shape.image_unit is None or height < LONG * width or not _is_shrunk(width, height, shape, config):
        return None
    unit = shape.image_unit
    heights = range(config.visual_tokens * unit // width * unit, width, -unit)
    return next((rows for rows in heights if not _is_shrunk(width, rows, shape, config)), width)


def cut(image: Image.Image, tallest: int) -> tuple[Piece, ...]:
    """Cut an upright RGB page into pieces of at most `tallest` rows, from top to bottom, that cover all of it."""
    gaps = find_gaps(image)
    usual = float(np.median(gaps[:, 1] - gaps[:, 0])) if len(gaps) else 0.0
    pieces: list[Piece] = []
    top = shared = 0
    while image.height - top > tallest:
        # What is left should not end in a sliver, so the pieces to come share it.
        most = min(tallest, math.ceil((image.height - top) / math.ceil((image.height - top) / tallest) * 1.1))
        place = _best_place(gaps, top + most // 2, top + most, TYPICAL * usual)
        pieces.append(Piece(top, top + most if place is None else place, shared))
        shared = round(OVERLAP * most) if place is None else 0
        top = pieces[-1].bottom - shared
    return (*pieces, Piece(top, image.height, shared))


def find_gaps(image: Image.Image) -> NDArray[np.int64]:
    """The runs of rows without ink, (runs, 2): first row, and the one behind the last. Lines of a frame do not count as ink."""
    contrasts = contrast(image)
    ink = contrasts > threshold(contrasts)
    ink[:, ink.mean(axis=0) > BORDER] = False
    empty = np.concatenate([[0], ~ink.any(axis=1), [0]]).astype(np.int8)
    steps = np.diff(empty)
    return np.stack([np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)], axis=1)


def _best_place(gaps: NDArray[np.int64], least: int, most: int, tall_enough: float) -> int | None:
    """The middle of the lowest gap between two rows that is about as wide as the widest; None without any."""
    inside = np.clip(gaps, least, most)
    heights = inside[:, 1] - inside[:, 0]
    fitting = heights >= max(1.0, tall_enough)
    if not fitting.any():
        return None
    best = np.flatnonzero(fitting & (heights >= ABOUT * heights[fitting].max()))[-1]
    return int(inside[best].sum() // 2)


def _is_shrunk(width: int, height: int, shape: ModelShape, config: EngineConfig) -> bool:
    assert shape.image_unit is not None, "a model without an image unit takes no pictures"
    if config.sizing == "exact":
        return width * height > config.visual_tokens * shape.image_unit**2
    least = min(shape.min_visual_tokens or 1, config.visual_tokens)
    canvas = bucket(width, height, shape.image_unit, least, config.visual_tokens).canvas
    return canvas[0] < width or canvas[1] < height
