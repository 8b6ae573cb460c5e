"""How large a picture becomes before the vision tower sees it: plain arithmetic on sizes, no pixels.

    (width, height) of the upright picture -> Layout: the canvas, the rectangle on it that the picture fills, the token grid

A visual token is a square of `unit` pixels (`patch_size * merge_size` of the model's own processor: 32 for Qwen3-VL, 28 for
GLM-OCR). There are two policies. `bucket` letterboxes onto one of a small set of canvases, so that compiled shapes repeat and
small print is not blurred by a second resize; `exact` is the reference processor's resize, so that tokens are identical to
it. The seam lies here, away from the pixels, because the memory plan, the training script and the HTTP routes ask for sizes
without having a picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from kaminari_core.errors import ImageError, UsageError

LARGEST_RATIO = 200
"""The reference resize refuses a picture whose longer side is more than this many times the shorter one."""

WORTHWHILE = 1.1
"""How much longer the sides of a shrunk picture must become for a canvas of twice the tokens to be taken."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a resized picture lies; sizes are (width, height) in pixels.

    `content` is the rectangle (left, top, width, height) of the picture on `canvas`, `grid` the (rows, columns) of visual
    tokens that cover the canvas, and `budget` the most visual tokens that the picture was allowed.
    """

    canvas: tuple[int, int]
    content: tuple[int, int, int, int]
    grid: tuple[int, int]
    budget: int

    @property
    def tokens(self) -> int:
        """The number of visual tokens."""
        return self.grid[0] * self.grid[1]


def budgets(min_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """The ladder of `bucket`: min_tokens, doubled as long as it stays within max_tokens.

    Raises UsageError when max_tokens is below min_tokens.
    """
    _check_bounds(min_tokens, max_tokens)
    return tuple(min_tokens << step for step in range((max_tokens // min_tokens).bit_length()))


def closest_grid(width: int, height: int, tokens: int) -> tuple[int, int]:
    """The (rows, columns) with rows * columns = tokens whose shape is closest to width : height.

    Closest means the smallest |log((columns / rows) / (width / height))|, compared in whole numbers so that no rounding
    decides. All these grids have the same area, so the closest is also the one that shrinks the picture least; of two that
    are equally close the wider is taken.
    """

    def distance(grid: tuple[int, int]) -> tuple[Fraction, int]:
        across, down = grid[1] * height, grid[0] * width
        return Fraction(max(across, down), min(across, down)), -grid[1]

    return min(_grids(tokens), key=distance)


def bucket(width: int, height: int, unit: int, min_tokens: int, max_tokens: int, *, name: str = "image") -> Layout:
    """Letterbox a picture onto the smallest canvas of the ladder that holds it, else onto the one that shrinks it least.

    For each budget of `budgets` the canvas is `closest_grid` times `unit`. A picture that fits keeps its size, except that
    one with fewer than min_tokens * unit**2 pixels is enlarged to that area as far as its canvas allows: the models were never
    trained below it. Where nothing holds it, a larger canvas has to be worth its tokens (`WORTHWHILE`): the best grid of 512 is
    1 : 2, so a large square picture keeps the same pixels, at half the cost, on 256. The aspect ratio is kept up to rounding and
    the picture is centred; a spare odd pixel goes right and below. Raises ImageError, with `name` as its param, when shrinking
    would leave less than half a pixel of one side.
    """
    scale = 0.0
    for budget in budgets(min_tokens, max_tokens):
        grid = closest_grid(width, height, budget)
        reached = min(grid[1] * unit / width, grid[0] * unit / height)
        if reached >= 1 or reached > WORTHWHILE * scale:
            scale, (rows, columns) = reached, grid
        if reached >= 1:
            break
    canvas = columns * unit, rows * unit
    if scale >= 1:
        scale = min(scale, max(1.0, math.sqrt(min_tokens * unit**2 / (width * height))))
    if min(width, height) * scale < 0.5:
        raise ImageError(
            f"{name}: {width} x {height} pixels are too long and narrow: fitted to {canvas[0]} x {canvas[1]} pixels, the "
            "shorter side would vanish. Crop the picture, cut it into pieces, or allow more visual tokens.",
            param=name,
            code="image_aspect_ratio",
        )
    fitted = min(canvas[0], max(1, round(width * scale))), min(canvas[1], max(1, round(height * scale)))
    left, top = (canvas[0] - fitted[0]) // 2, (canvas[1] - fitted[1]) // 2
    return Layout(canvas, (left, top, *fitted), (rows, columns), max_tokens)


def exact(
    width: int,
    height: int,
    unit: int,
    min_tokens: int,
    max_tokens: int,
    *,
    widen: bool = False,
    name: str = "image",
) -> Layout:
    """Resize as the reference processors do, stretching each side to a multiple of `unit`; the picture fills its canvas.

    With `widen` False this is Qwen2-VL's and Qwen3-VL's rule; True is GLM-4.6V's and GLM-OCR's, which first enlarges a picture
    with a side below `unit`. GLM's own bounds count each still picture as two frames: its min_tokens and max_tokens here are
    half of what its `size` says in pixels. Raises ImageError, with `name` as its param, for a ratio beyond 200 : 1, and for
    a narrow picture that the reference would let exceed max_tokens.
    """
    _check_bounds(min_tokens, max_tokens)
    if widen and min(width, height) < unit:
        growth = max(unit / height, unit / width)
        width, height = int(width * growth), int(height * growth)
    ratio = max(width, height) / min(width, height)
    if ratio > LARGEST_RATIO:
        raise ImageError(
            f"{name}: {width} x {height} pixels have a ratio of {ratio:.0f} : 1, and exact sizing takes at most "
            f"{LARGEST_RATIO} : 1. Crop the picture or use bucket sizing.",
            param=name,
            code="image_aspect_ratio",
        )
    canvas = smart_resize(width, height, unit, min_tokens * unit**2, max_tokens * unit**2)
    grid = canvas[1] // unit, canvas[0] // unit
    if grid[0] * grid[1] > max_tokens:
        raise ImageError(
            f"{name}: {width} x {height} pixels (ratio {ratio:.0f} : 1) take {grid[0] * grid[1]} visual tokens with exact "
            f"sizing, but at most {max_tokens} are allowed. Crop the picture, allow more, or use bucket sizing.",
            param=name,
            code="image_aspect_ratio",
        )
    return Layout(canvas, (0, 0, *canvas), grid, max_tokens)


def smart_resize(width: int, height: int, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The (width, height), in multiples of `unit`, that the Qwen2-VL processor resizes a picture to.

    The same formula, step for step, as `smart_resize` in transformers/models/qwen2_vl/image_processing_pil_qwen2_vl.py: each
    side rounded half to even, then floored when the area is above max_pixels or raised when it is below min_pixels. A side is
    never below one unit, so a narrow picture can exceed max_pixels.
    """
    fitted = round(width / unit) * unit, round(height / unit) * unit
    if fitted[0] * fitted[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        fitted = (
            max(unit, math.floor(width / shrink / unit) * unit),
            max(unit, math.floor(height / shrink / unit) * unit),
        )
    elif fitted[0] * fitted[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        fitted = math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
    return fitted


def _grids(tokens: int) -> Iterator[tuple[int, int]]:
    for rows in range(1, math.isqrt(tokens) + 1):
        if tokens % rows == 0:
            yield rows, tokens // rows
            yield tokens // rows, rows


def _check_bounds(min_tokens: int, max_tokens: int) -> None:
    if max_tokens < min_tokens:
        raise UsageError(
            f"visual-tokens is {max_tokens}, but this model takes at least {min_tokens} visual tokens for one picture"
        )
