"""Whether a page has anything to read, told from its pixels before a model is asked, because models answer blank paper with text
of their own.

The measure is the contrast of ink.py. A page is blank when no place of it has more than FLOOR, or when what it has looks like the
noise of paper and sensor in every way that print does not: nothing stands out (STANDS_OUT), light and dark are alike (SKEW), the
values are spread as chance spreads them (KURTOSIS: print is either rare and strong, or dense and two-valued), and no row or
column has more of it than others, as lines of print have (UNEVEN). Anything else is read. So the errors lie on one side: a page
with dust, a fold or print shining through from its back costs a request, while one with a single full stop is not called
blank. docs/read.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

from kaminari_core.documents.ink import NEAR, contrast, means

FLOOR: Final = 6
"""Contrast, of 255, that rounding and the compression of blank paper leave behind. Grey of 20 on white has 7 in its strokes."""
CEILING: Final = 40
"""Contrast that is not asked whether it is noise: noise of a standard deviation of 20 has less."""
STANDS_OUT: Final = 6.5
"""Standard deviations; of the 10 million places of a page, chance reaches 5.5."""
SKEW: Final = 0.4
"""The third moment over the 1.5th power of the second: 0 for noise, and less far from it than this where white cuts it off."""
KURTOSIS: Final = (2.5, 3.8)
"""The fourth moment over the squared second one, which is 3 for noise."""
UNEVEN: Final = 1.5
"""How much more the energies of rows (or columns) may differ than those of noise that is alike over ALIKE pixels would."""
ALIKE: Final = 10
BAND: Final = 512
"""Rows that are looked at together; a page of text is known as such by its first band."""


def is_blank(image: Image.Image) -> bool:
    """Whether an upright RGB picture holds nothing that could be read."""
    strongest = 0
    for band in _bands(image):
        strongest = max(strongest, int(contrast(band).max()))
        if strongest > CEILING:
            return False
    return strongest <= FLOOR or all(_is_noise(channel) for channel in _channels(image))


def _bands(image: Image.Image) -> Iterator[Image.Image]:
    for top in range(0, image.height, BAND):
        # One more row on both sides, so that what lies on the border of two bands is whole in one of them.
        yield image.crop((0, max(0, top - NEAR), image.width, min(image.height, top + BAND + NEAR)))


def _channels(image: Image.Image) -> tuple[Image.Image, ...]:
    """The three channels of a picture, or the one of a grey picture."""
    first, *others = image.split()
    return (first, *(other for other in others if ImageChops.difference(first, other).getbbox()))


def _is_noise(channel: Image.Image) -> bool:
    """Whether the contrasts of a channel, with their signs, are those of noise."""
    counts = np.zeros(256)
    rows: list[NDArray[np.float32]] = []
    columns = np.zeros(channel.width)
    for band in _bands(channel):
        signed = np.asarray(ImageChops.subtract(*means(band), 1, 128))
        counts += np.bincount(signed.ravel(), minlength=256)
        energy = np.square(signed.astype(np.float32) - 128)
        rows.append(energy.mean(axis=1))
        columns += energy.sum(axis=0)
    values = np.arange(-128, 128)
    deviation, skew, kurtosis = _moments(values, counts / counts.sum())
    return bool(
        np.abs(values[counts > 0]).max() <= max(FLOOR, STANDS_OUT * deviation)
        and abs(skew) <= SKEW
        and KURTOSIS[0] <= kurtosis <= KURTOSIS[1]
        and _is_even(np.concatenate(rows), channel.width)
        and _is_even(columns, channel.height)
    )


def _moments(values: NDArray[np.int64], shares: NDArray[np.float64]) -> tuple[float, float, float]:
    """Standard deviation, skew and kurtosis of values with these shares; those of a constant are 0, 0 and 3."""
    centred = values - float((shares * values).sum())
    second, third, fourth = (float((shares * centred**power).sum()) for power in (2, 3, 4))
    if second == 0:
        return 0.0, 0.0, 3.0
    return second**0.5, third / second**1.5, fourth / second**2


def _is_even(energies: NDArray[np.floating], pixels: int) -> bool:
    """Whether rows (or columns) of so many pixels have energies as equal as those of noise."""
    mean = float(energies.mean())
    return mean == 0 or float(energies.std()) / mean <= UNEVEN * (2 * ALIKE / pixels) ** 0.5
