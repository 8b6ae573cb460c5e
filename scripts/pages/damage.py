"""What happens to a page on its way through a camera, a fax and a mail program: five kinds of damage, each of one strength."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np
from PIL import Image, ImageFilter

from pages.drawing import Picture

BLUR = 1.2
JPEG_QUALITY = 20
ROTATION = 3.0
NOISE = 25.0
CONTRAST = 0.3


def blur(picture: Picture, random: np.random.Generator) -> Picture:
    """Blur with a Gaussian of `BLUR` px standard deviation."""
    image = Image.fromarray(picture.pixels).filter(ImageFilter.GaussianBlur(BLUR))
    return replace(picture, pixels=np.asarray(image))


def jpeg(picture: Picture, random: np.random.Generator) -> Picture:
    """Store as a JPEG of quality `JPEG_QUALITY` and read it again."""
    file = io.BytesIO()
    Image.fromarray(picture.pixels).save(file, "JPEG", quality=JPEG_QUALITY)
    return replace(picture, pixels=np.asarray(Image.open(file)))


def rotate(picture: Picture, random: np.random.Generator) -> Picture:
    """Turn by `ROTATION` degrees to one side or the other, on paper that grows with it; the centres turn along."""
    angle = ROTATION * float(random.choice([-1.0, 1.0]))
    paper = int(np.median(picture.pixels))
    image = Image.fromarray(picture.pixels).rotate(
        angle, resample=Image.Resampling.BICUBIC, expand=True, fillcolor=paper
    )
    before = np.array(picture.pixels.shape[::-1], np.float64) / 2
    after = np.array(image.size, np.float64) / 2
    cosine, sine = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    # Counter-clockwise as it is seen, with y growing downwards.
    centres = (picture.centres - before) @ np.array([[cosine, -sine], [sine, cosine]]) + after
    return replace(picture, pixels=np.asarray(image), centres=centres.astype(np.float32))


def noise(picture: Picture, random: np.random.Generator) -> Picture:
    """Add Gaussian noise of `NOISE` grey levels standard deviation."""
    noisy = picture.pixels + random.normal(0.0, NOISE, picture.pixels.shape)
    return replace(picture, pixels=np.clip(noisy, 0, 255).astype(np.uint8))


def fade(picture: Picture, random: np.random.Generator) -> Picture:
    """Lower the contrast: what is darker than white is `CONTRAST` as dark."""
    return replace(picture, pixels=(255 - (255.0 - picture.pixels) * CONTRAST).astype(np.uint8))


DAMAGES: Final[Mapping[str, Callable[[Picture, np.random.Generator], Picture]]] = MappingProxyType(
    {"blur": blur, "jpeg": jpeg, "rotate": rotate, "noise": noise, "fade": fade}
)
