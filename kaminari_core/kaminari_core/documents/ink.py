"""Where something is printed on a page: how much each place differs from what lies beside it on its own row.

    contrast = |mean of 3 x 3 pixels - mean of 33 x 3 pixels|, the largest of the three colours, 0..255

The small mean takes two thirds of the noise of paper and sensor away and still sees a dot; the wide one follows shadows and
tinted paper; and as both look at the same three rows, the white between two lines of print stays white.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageFilter

NEAR, AROUND = 1, 16
"""Radii of the two means in pixels: half the width of the thinnest stroke that must be seen, and of the paper around it."""
LEAST, MOST = 10.0, 40.0
"""Bounds of `threshold`."""
SIGMAS: Final = 8.0
BLOCK: Final = 8
QUIET: Final = 10
"""The percentile of blocks whose contrast is taken for the noise: print leaves more than that part of most pages free."""


def means(image: Image.Image) -> tuple[Image.Image, Image.Image]:
    """The mean of 3 x 3 pixels at each place, and that of 33 x 3."""
    return image.filter(ImageFilter.BoxBlur(NEAR)), image.filter(ImageFilter.BoxBlur((AROUND, NEAR)))


def contrast(image: Image.Image) -> NDArray[np.uint8]:
    """The contrast of an RGB picture at each place, (height, width)."""
    return np.asarray(reduce(ImageChops.lighter, ImageChops.difference(*means(image)).split()))


def threshold(contrasts: NDArray[np.uint8]) -> float:
    """The contrast above which a place of a printed page counts as ink: SIGMAS times its noise, between LEAST and MOST.

    The noise is the root mean square contrast of the quieter blocks of BLOCK x BLOCK pixels (the QUIET-th percentile).
    """
    rows, columns = contrasts.shape[0] // BLOCK, contrasts.shape[1] // BLOCK
    if not rows or not columns:
        return LEAST
    squares = np.square(contrasts[: rows * BLOCK, : columns * BLOCK], dtype=np.float32)
    energy = squares.reshape(rows, BLOCK, columns, BLOCK).mean(axis=(1, 3))
    noise = float(np.sqrt(np.percentile(energy, QUIET)))
    return min(max(SIGMAS * noise, LEAST), MOST)
