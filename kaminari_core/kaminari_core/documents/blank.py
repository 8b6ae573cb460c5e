"""Whether a page has anything to read, told from its pixels before a model is asked, because models answer blank paper with text
of their own.

A page is blank when no place of it counts as ink (`ink.py`). The choice of numbers leans to one side: a page with dust, a fold or
print shining through from its back is read, at the cost of one request, while a page with a single full stop must never be
called blank. docs/read.md has what was measured.
"""

from __future__ import annotations

from typing import Final

from PIL import Image

from kaminari_core.documents.ink import NEAR, contrast, threshold

BAND: Final = 512
"""Rows that are looked at together; a page of text is known as such by its first band."""


def is_blank(image: Image.Image) -> bool:
    """Whether an upright RGB picture holds nothing that could be read."""
    width, height = image.size
    for top in range(0, height, BAND):
        # One more row on both sides, so that what lies on the border of two bands is whole in one of them.
        band = image.crop((0, max(0, top - NEAR), width, min(height, top + BAND + NEAR)))
        contrasts = contrast(band)
        if contrasts.max() > threshold(contrasts):
            return False
    return True
