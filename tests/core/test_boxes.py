"""Boxes found on the canvas that the model sees, against where they lie in the file."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import ExifTags, Image

from kaminari_core.boxes import from_file, to_file
from kaminari_core.config import EngineConfig, Sizing
from kaminari_core.flow import ImagePart, Saw
from kaminari_core.images import open_picture
from kaminari_core.patches import ImageProcessor, fit_picture


def processor(sizing: Sizing) -> ImageProcessor:
    config = EngineConfig(sizing=sizing, visual_tokens=256)
    return ImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2, mean=(0.5,) * 3, std=(0.5,) * 3, min_tokens=64,
                          max_tokens=16_384, config=config)  # type: ignore[arg-type]  # fmt: skip


def marked(size: tuple[int, int], box: tuple[int, int, int, int], orientation: int) -> bytes:
    image = Image.new("RGB", size, "white")
    image.paste("black", box)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("sizing", ["bucket", "exact"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(640, 200), (200, 640), (90, 70), (1600, 900)], ids=str)
def test_boxes_land_on_the_pixels_of_the_file(size: tuple[int, int], orientation: int, sizing: Sizing) -> None:
    box = (size[0] // 5, size[1] // 3, size[0] // 2, size[1] - 11)
    data = marked(size, box, orientation)
    _, (saw,) = processor(sizing).see([ImagePart(data)])
    picture = open_picture(data, "picture", EngineConfig())
    layout = processor(sizing).layout(*picture.image.size)
    canvas = np.asarray(fit_picture(picture.image, layout, processor(sizing).resample))[..., 0]
    rows, columns = np.nonzero(canvas < 128)
    edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    seen = tuple(1000 * edge / side for edge, side in zip(edges, layout.canvas * 2, strict=True))
    shrunk = max(1.0, picture.image.width / layout.content[2])
    assert to_file(seen, saw) == pytest.approx(box, abs=shrunk)
    assert from_file(box, saw) == pytest.approx(seen, abs=1000 * 1.01 / min(layout.canvas))
    assert to_file(from_file(box, saw), saw) == pytest.approx(box, abs=1e-6)


def test_the_letterbox_margin_is_the_edge_of_the_picture() -> None:
    _, (saw,) = processor("bucket").see([ImagePart(marked((640, 200), (0, 0, 1, 1), 1))])
    assert isinstance(saw, Saw)
    assert to_file((0, 0, 1000, 1000), saw) == pytest.approx((0, 0, 640, 200))
