"""How a picture is laid on its canvas before patches are cut: the product's own bucket sizing, on grey pixels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kaminari_core.sizing import Layout, bucket

UNIT = 32
MIN_TOKENS = 8
MAX_TOKENS = 512


@dataclass(frozen=True)
class Placed:
    """A grey picture on its canvas (H, W), the grid in visual tokens (rows, columns), and the map of picture to canvas."""

    pixels: NDArray[np.uint8]
    grid: tuple[int, int]
    scale: tuple[float, float]
    offset: tuple[int, int]


@functools.cache
def layout(width: int, height: int, unit: int) -> Layout:
    """Give the product's layout of a picture of a size in pixels."""
    return bucket(width, height, unit, MIN_TOKENS, MAX_TOKENS)


def place(pixels: NDArray[np.uint8], unit: int = UNIT) -> Placed:
    """Lay a grey picture on the middle of a white canvas, enlarging tiny ones and shrinking those that do not fit."""
    height, width = pixels.shape
    plan = layout(width, height, unit)
    left, top, new_width, new_height = plan.content
    if (new_width, new_height) != (width, height):
        pixels = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.LANCZOS))
    canvas = np.full((plan.canvas[1], plan.canvas[0]), 255, np.uint8)
    canvas[top : top + new_height, left : left + new_width] = pixels
    return Placed(canvas, plan.grid, (new_width / width, new_height / height), (left, top))
