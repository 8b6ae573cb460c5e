"""Boxes in a reply: how they are written, and that they land on the pixels of the file that was uploaded."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import ExifTags, Image

from kaminari_core.boxes import from_file, to_file
from kaminari_core.config import EngineConfig, Sizing
from kaminari_core.evidence.facts import Source
from kaminari_core.evidence.grounding import find_boxes
from kaminari_core.evidence.pages import count_pages
from kaminari_core.flow import ImagePart, Saw
from kaminari_core.images import open_picture
from kaminari_core.patches import ImageProcessor, fit_picture


def processor(sizing: Sizing) -> ImageProcessor:
    config = EngineConfig(sizing=sizing, visual_tokens=256)
    return ImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2, mean=(0.5,) * 3, std=(0.5,) * 3, min_tokens=64,
                          max_tokens=16_384, config=config)  # type: ignore[arg-type]  # fmt: skip


def encoded(image: Image.Image, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def seen(part: ImagePart, sizing: Sizing) -> tuple[Saw, tuple[float, ...]]:
    """What is seen of a picture, and the box of what is black on the canvas, in thousandths."""
    _, (saw,) = processor(sizing).see([part])
    image = open_picture(part.data, "picture", EngineConfig()).image
    layout = processor(sizing).layout(*image.size)
    canvas = np.asarray(fit_picture(image, layout, processor(sizing).resample))[..., 0]
    rows, columns = np.nonzero(canvas < 128)
    edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    return saw, tuple(float(1000 * edge / side) for edge, side in zip(edges, layout.canvas * 2, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_fifty_boxes_at_random_come_back_to_the_pixel(seed: int) -> None:
    """Any size, orientation and sizing, whole or cropped: found on the canvas, and mapped back to within a pixel of the file."""
    draw = random.Random(seed)
    for number in range(50):
        size = draw.randint(60, 440), draw.randint(60, 440)
        sizing: Sizing = ("bucket", "exact")[number % 2]  # type: ignore[assignment]
        box = tuple(sorted(draw.sample(range(2, size[0] - 2, 4), 2)) + sorted(draw.sample(range(2, size[1] - 2, 4), 2)))
        box = box[0], box[2], box[1], box[3]
        image = Image.new("RGB", size, "white")
        image.paste("black", box)
        part = ImagePart(encoded(image, number % 8 + 1))
        if number % 3 == 0:
            part = cropped(part, box, draw)
        saw, found = seen(part, sizing)
        assert saw.source == part.source
        shrunk = max(1.0, open_picture(part.data, "", EngineConfig()).image.width / saw.content[2])
        assert shrunk < 1.5, "a box cannot be finer than the canvas"
        assert to_file(found, saw) == pytest.approx(box, abs=shrunk)  # type: ignore[arg-type]
        assert to_file(from_file(box, saw), saw) == pytest.approx(box, abs=1e-6)
        (grounded,) = find_boxes(f'{{"bbox_2d": {list(found)}, "label": "x"}}', [saw])
        assert grounded.file == to_file(found, saw)  # type: ignore[arg-type]


def cropped(part: ImagePart, box: Sequence[int], draw: random.Random) -> ImagePart:
    """A piece of the upright page around the box, as reading long pages makes it."""
    picture = open_picture(part.data, "", EngineConfig())
    upright = picture.image
    columns, rows = np.nonzero((np.asarray(upright)[..., 0] < 128).T)
    left, top = draw.randint(0, int(columns.min())), draw.randint(0, int(rows.min()))
    right, bottom = (
        draw.randint(int(columns.max()) + 1, upright.width),
        draw.randint(int(rows.max()) + 1, upright.height),
    )
    crop = left, top, right - left, bottom - top
    data = encoded(upright.crop((left, top, right, bottom)))
    return ImagePart(data, "piece", Source(picture.decoded, picture.rotation, crop, 2, 3))


SAW = Saw("PNG", (500, 250), "none", "bucket", (512, 256), (0, 0, 512, 256), (8, 16), 128, 256)
HALF, HALF_FILE = (0.0, 0.0, 500.0, 500.0), (0.0, 0.0, 250.0, 125.0)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ('```json\n[\n\t{"bbox_2d": [0, 0, 500, 500], "label": "dog"}\n]\n```', ["dog"]),
        ('{"bbox_2d": [0, 0, 500, 500], "text_content": "TOTAL"}', ["TOTAL"]),
        ('Here: {"a": {"bbox": [[0, 0, 500, 500], [0,0,500.0,500]], "label": "b"}} and so on', ["b", "b"]),
        ("[0, 0, 500, 500]", [None]),
        ("cat: [0, 0, 500, 500], dog: [0, 0, 500, 500]", ["cat", "dog"]),
        ("a dog(0,0),(500,500)\nTwo: (0, 0), (500, 500)", ["a dog", "Two"]),
        ("<box>(0,0),(500,500)</box>", ["box"]),
        ("[[0,0,500,500],[0,0,500,500]]", [None, None]),
        ('[{"bbox_2d": [0, 0, 500, 500], "label": "whole"}, {"bbox_2d": [0, 0, 5', ["whole"]),
        ('{"bbox_2d": [0, 0, 500, 500], "label": 3}', [None]),
    ],
)  # fmt: skip
def test_boxes_are_found_however_they_are_written(text: str, labels: list[str | None]) -> None:
    found = find_boxes(text, [SAW])
    assert [box.label for box in found] == labels
    assert {(box.model, box.file, box.picture) for box in found} == {(HALF, HALF_FILE, 0)}


@pytest.mark.parametrize(
    "text",
    [
        "", "no box", "[1, 2, 3]", "[1, 2, 3, 4, 5]", '{"sizes": [1, 2, 3, 4]}', '{"bbox_2d": [1, 2, 3]}', "[true, 1, 2, 3]",
        '{"bbox_2d": "1, 2, 3, 4"}', '{"bbox_2d": [1, 2, 3, "4"]}', "f(1, 2)", "(1,2),(3", "[" * 5000, '{"a": ' * 5000,
        "[" * 900 + "]" * 900,
    ],
)  # fmt: skip
def test_nothing_is_taken_for_a_box_that_is_none(text: str) -> None:
    assert find_boxes(text, [SAW]) == ()


def test_a_box_that_cannot_be_placed_is_given_as_it_was_written_and_no_more() -> None:
    (beyond,) = find_boxes('{"bbox_2d": [10, 20, 1100, 30]}', [SAW])
    assert (beyond.model, beyond.file, beyond.picture) == ((10, 20, 1100, 30), None, 0)
    (below,) = find_boxes("[-1, 0, 5, 5]", [SAW])
    assert below.file is None
    for saw in ([], [SAW, SAW]):
        (unplaced,) = find_boxes("[0, 0, 500, 500]", saw)
        assert (unplaced.model, unplaced.file, unplaced.picture) == (HALF, None, None)
    (swapped,) = find_boxes("[500, 500, 0, 0]", [SAW])
    assert swapped.file == HALF_FILE


def tiff(pages: int, **settings: object) -> bytes:
    first, *others = [Image.new("L", (40, 30 + number)) for number in range(pages)]
    buffer = io.BytesIO()
    first.save(buffer, "TIFF", save_all=True, append_images=others, **settings)
    return buffer.getvalue()


@pytest.mark.parametrize("big", [False, True])
def test_pages_of_a_tiff_are_counted_and_reported(big: bool) -> None:
    data = tiff(3, big_tiff=big)
    assert count_pages(data) == 3
    assert count_pages(tiff(1, big_tiff=big)) == 1
    _, (saw,) = processor("bucket").see([ImagePart(data)])
    assert (saw.page, saw.pages, saw.source) == (1, 3, None)


def test_what_is_damaged_or_goes_round_ends_the_count() -> None:
    data = tiff(3)
    for size in range(len(data)):
        assert 1 <= count_pages(data[:size]) <= 3
    round_trip = b"II*\0" + (8).to_bytes(4, "little") + (0).to_bytes(2, "little") + (8).to_bytes(4, "little")
    assert count_pages(round_trip) == 1
    chain = b"MM\0*" + (8).to_bytes(4, "big")
    chain += b"".join(b"\0\0" + (8 + 6 * number).to_bytes(4, "big") for number in range(1, 20_000)) + bytes(6)
    assert count_pages(chain) == 10_000


def test_smaller_copies_of_a_page_are_none() -> None:
    def directory(flags: int, following: int) -> bytes:
        entry = b"".join(value.to_bytes(size, "big") for value, size in ((254, 2), (4, 2), (1, 4), (flags, 4)))
        return (1).to_bytes(2, "big") + entry + following.to_bytes(4, "big")

    data = b"MM\0*" + (8).to_bytes(4, "big") + directory(0, 26) + directory(1, 44) + directory(2, 0)
    assert count_pages(data) == 2


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"II*\0", encoded(Image.new("L", (3, 3)))])
def test_other_files_are_one_page(data: bytes) -> None:
    assert count_pages(data) == 1
