"""Boxes that a model writes -> pixels of the uploaded file, and back.

    thousandths of the canvas -> pixels of the canvas -> of the upright picture -> of the upright page -> of the file

A model answers in thousandths of what it saw: the canvas, after turning upright, cropping, resizing and letterboxing. The person
who asked has the file. `flow.Saw` holds every step between the two, so the way back needs no second look at the picture.
"""

from __future__ import annotations

from kaminari_core.flow import Saw

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
SCALE = 1000
"""Qwen3-VL and GLM-4.6V write coordinates from 0 to this."""


def to_file(box: Box, saw: Saw, scale: float = SCALE) -> Box:
    """A box in `scale`-ths of the canvas -> pixels of the uploaded file, as stored before rotation.

    What lies on the letterbox margin is moved to the edge of the picture. Of a picture that was made from a larger file, the
    file is that one (`Saw.source`).
    """
    left, top, width, height = saw.content
    size, rotation, (crop_left, crop_top, crop_width, crop_height) = _origin(saw)
    across = [crop_left + _clamp((x / scale * saw.canvas[0] - left) / width) * crop_width for x in (box[0], box[2])]
    down = [crop_top + _clamp((y / scale * saw.canvas[1] - top) / height) * crop_height for y in (box[1], box[3])]
    return _ordered(*(_turn_back(x, y, size, rotation) for x, y in zip(across, down, strict=True)))


def from_file(box: Box, saw: Saw, scale: float = SCALE) -> Box:
    """A box in pixels of the uploaded file -> `scale`-ths of the canvas that the model sees."""
    left, top, width, height = saw.content
    size, rotation, (crop_left, crop_top, crop_width, crop_height) = _origin(saw)
    corners = [_turn(x, y, size, rotation) for x, y in ((box[0], box[1]), (box[2], box[3]))]
    return _ordered(
        *(
            (
                ((x - crop_left) / crop_width * width + left) / saw.canvas[0] * scale,
                ((y - crop_top) / crop_height * height + top) / saw.canvas[1] * scale,
            )
            for x, y in corners
        )
    )


def _origin(saw: Saw) -> tuple[tuple[int, int], str, tuple[int, int, int, int]]:
    """Size and rotation of the file, and the rectangle of its upright page that the picture shows."""
    if saw.source is not None:
        return saw.source.size, saw.source.rotation, saw.source.crop
    return saw.decoded, saw.rotation, (0, 0, *_upright(saw.decoded, saw.rotation))


def _upright(size: tuple[int, int], rotation: str) -> tuple[int, int]:
    return (size[1], size[0]) if rotation.startswith(("90", "270")) else size


def _turn(x: float, y: float, size: tuple[int, int], rotation: str) -> tuple[float, float]:
    """A point of the file -> the upright page: turned clockwise, then mirrored left to right."""
    width, height = size
    turn, _, mirror = rotation.partition("+")
    x, y = {"none": (x, y), "90": (height - y, x), "180": (width - x, height - y), "270": (y, width - x)}[turn]
    return (_upright(size, rotation)[0] - x if mirror else x), y


def _turn_back(x: float, y: float, size: tuple[int, int], rotation: str) -> tuple[float, float]:
    width, height = size
    turn, _, mirror = rotation.partition("+")
    x = _upright(size, rotation)[0] - x if mirror else x
    return {"none": (x, y), "90": (y, height - x), "180": (width - x, height - y), "270": (width - y, x)}[turn]


def _ordered(first: tuple[float, float], second: tuple[float, float]) -> Box:
    return min(first[0], second[0]), min(first[1], second[1]), max(first[0], second[0]), max(first[1], second[1])


def _clamp(fraction: float) -> float:
    return min(1.0, max(0.0, fraction))
