"""Upright pictures -> what a vision tower takes: the sized canvas, cut into normalised patches.

    ImagePart... -> limits -> for each: decode -> Layout -> canvas -> Patches, and Saw: what became of it

Every model of the Qwen2-VL line (Qwen3-VL, GLM-OCR) cuts pictures the same way and differs only in the numbers of its
processor file, so the numbers are the fields of `ImageProcessor` and the cutting is written once. The reference are the Pillow
classes of transformers, `Qwen2VLImageProcessorPil` and `Glm46VImageProcessorPil`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from kaminari_core.config import EngineConfig
from kaminari_core.errors import PageTooLargeError, UsageError
from kaminari_core.evidence.pages import count_pages
from kaminari_core.flow import ImagePart, Patches, Saw
from kaminari_core.images import Picture, check_limits, decode, read_header
from kaminari_core.sizing import Layout, bucket, budgets, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """How one checkpoint looks at pictures, under one engine's settings.

    `patch_size` is in pixels, `merge_size` in patches per side of a visual token, `mean` and `std` per channel of pixels
    scaled to 0..1. `min_tokens` and `max_tokens` are the processor's own bounds of one picture in visual tokens. `widen` is
    GLM's first step of exact sizing (see `sizing.exact`). Raises UsageError when the settings allow less than `min_tokens`.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_tokens: int
    max_tokens: int
    config: EngineConfig
    widen: bool = False

    def __post_init__(self) -> None:
        budgets(self.min_tokens, self.config.visual_tokens)
        if 0 < self.config.page_tokens < self.min_tokens:
            raise UsageError(
                f"page-tokens is {self.config.page_tokens}, but a picture of this model has at least {self.min_tokens}"
            )

    @property
    def unit(self) -> int:
        """The side of one visual token in pixels."""
        return self.patch_size * self.merge_size

    @property
    def budget(self) -> int:
        """The most visual tokens one picture may take."""
        return min(self.config.visual_tokens, self.max_tokens)

    def layout(self, width: int, height: int, name: str = "image") -> Layout:
        """Where a picture of this upright size lies.

        Raises ImageError, with `name` as its param, for an extreme ratio, and PageTooLargeError for a picture that is larger than
        memory was planned for: it is not shrunk further than `visual_tokens` says.
        """
        if self.config.sizing == "bucket":
            found = bucket(width, height, self.unit, self.min_tokens, self.budget, name=name)
        else:
            found = exact(width, height, self.unit, self.min_tokens, self.budget, widen=self.widen, name=name)
        if 0 < self.config.page_tokens < found.tokens:
            raise self._too_large(width, height, found, name)
        return found

    def _too_large(self, width: int, height: int, found: Layout, name: str) -> PageTooLargeError:
        most = self.config.page_tokens
        return PageTooLargeError(
            f"{name}: {width} x {height} pixels take {found.tokens} visual tokens, but memory is planned for pictures of at most "
            f"{most} ({most * self.unit**2:,} pixels; page-tokens). Send a smaller picture, or plan for larger ones: fewer "
            "slots, a shorter --max-length or quantized weights leave room (`kaminari fit`)",
            param=name,
            code="page_too_large",
        )

    def see(self, parts: Sequence[ImagePart]) -> tuple[tuple[Patches, ...], tuple[Saw, ...]]:
        """All pictures of one request, in order, and what the model sees of each.

        Limits are checked on the headers of all before the first is decoded. Raises ImageError, with the part's name as its
        param.
        """
        headers = [read_header(part.data, part.name) for part in parts]
        check_limits(headers, self.config)
        seen = []
        for part in parts:
            header = headers.pop(0)  # which holds its decoded pixels from here on, so only one at a time is kept
            picture = decode(header)
            layout = self.layout(*picture.image.size, name=header.name)
            canvas = fit_picture(picture.image, layout, self.resample)
            seen.append((self.patchify(canvas), self._saw(part, picture, layout)))
        return tuple(patches for patches, _ in seen), tuple(saw for _, saw in seen)

    @property
    def resample(self) -> Image.Resampling:
        """LANCZOS keeps small print sharpest; exact sizing has to be BICUBIC as the reference processors are."""
        return Image.Resampling.LANCZOS if self.config.sizing == "bucket" else Image.Resampling.BICUBIC

    def patchify(self, canvas: Image.Image) -> Patches:
        """Cut an RGB canvas, whose sides are multiples of `unit`, into patches, in pinned memory where they go to a card."""
        pinned = self.config.device.startswith("cuda")
        sizes = self.patch_size, self.merge_size, self.temporal_patch_size
        return patchify(canvas, *sizes, self.mean, self.std, pinned=pinned)

    def _saw(self, part: ImagePart, picture: Picture, layout: Layout) -> Saw:
        source = part.source
        return Saw(
            format=picture.format,
            decoded=picture.decoded,
            rotation=picture.rotation,
            sizing=self.config.sizing,
            canvas=layout.canvas,
            content=layout.content,
            grid=layout.grid,
            visual_tokens=layout.tokens,
            budget=layout.budget,
            page=1 if source is None else source.page,
            pages=count_pages(part.data) if source is None else source.pages,
            source=source,
        )


def fit_picture(image: Image.Image, layout: Layout, resample: Image.Resampling) -> Image.Image:
    """Resize an RGB picture to the layout's content rectangle and lay it on a white canvas."""
    left, top, width, height = layout.content
    if image.size != (width, height):
        image = image.resize((width, height), resample)
    if image.size == layout.canvas:
        return image
    canvas = Image.new("RGB", layout.canvas, "white")
    canvas.paste(image, (left, top))
    return canvas


def patchify(
    canvas: Image.Image,
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    pinned: bool = False,
) -> Patches:
    """Cut an RGB canvas into the rows of one still picture.

    A row is (channels, temporal_patch_size, patch_size, patch_size) flattened, the frame repeated in time; rows are ordered by
    block row, block column, then row and column inside the merge_size x merge_size block that becomes one visual token.
    Pixels are scaled by 1/255 and normalised. There are only 256 values a channel can have, so they are computed once, in the
    order of operations of transformers' processors, and looked up. From `pinned` memory a card takes them in one copy that
    nothing waits for.
    """
    pixels = np.asarray(canvas)
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    blocks = pixels.reshape(
        rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size, 3
    )
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, patch_size, patch_size)
    size = rows * columns, 3, temporal_patch_size, patch_size, patch_size
    tensor = torch.empty(size, dtype=torch.float32, pin_memory=pinned)
    values = tensor.numpy()
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    for channel in range(3):
        table = (scaled - np.float32(mean[channel])) / np.float32(std[channel])
        values[:, channel] = table[blocks[:, channel]]
    return Patches(tensor.view(rows * columns, -1), (1, rows, columns))
