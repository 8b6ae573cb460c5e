"""Boxes that a model writes -> pixels of the uploaded file, and back.

A model answers in thousandths of what it saw: the canvas, after turning upright, resizing and letterboxing. The person who asked
has the file. `flow.Saw` holds every step between the two, so the way back needs no second look at the picture.
"""

from __future__ import annotations

from kaminari_core.flow import Saw

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
SCALE = 1000
"""Qwen3-VL and GLM-4.6V write coordinates from 0 to this."""


def to_file(box: Box, saw: Saw, scale: float = SCALE) -> Box:
    """A box in `scale`-ths of the canvas -> pixels of the uploaded file, as stored before rotation.

    What lies on the letterbox margin is moved to the edge of the picture.
    """
    left, top, width, height = saw.content
    upright_width, upright_height = _upright(saw)
    across = [_clamp((x / scale * saw.canvas[0] - left) / width) * upright_width for x in (box[0], box[2])]
    down = [_clamp((y / scale * saw.canvas[1] - top) / height) * upright_height for y in (box[1], box[3])]
    return _ordered(*(_turn_back(x, y, saw) for x, y in zip(across, down, strict=True)))


def from_file(box: Box, saw: Saw, scale: float = SCALE) -> Box:
    """A box in pixels of the uploaded file -> `scale`-ths of the canvas that the model sees."""
    left, top, width, height = saw.content
    upright_width, upright_height = _upright(saw)
    corners = [_turn(x, y, saw) for x, y in ((box[0], box[1]), (box[2], box[3]))]
    return _ordered(
        *(
            (
                (x / upright_width * width + left) / saw.canvas[0] * scale,
                (y / upright_height * height + top) / saw.canvas[1] * scale,
            )
            for x, y in corners
        )
    )


def _upright(saw: Saw) -> tuple[int, int]:
    width, height = saw.decoded
    return (height, width) if saw.rotation.startswith(("90", "270")) else (width, height)


def _turn(x: float, y: float, saw: Saw) -> tuple[float, float]:
    """A point of the file -> the upright picture: turned clockwise, then mirrored left to right."""
    width, height = saw.decoded
    turn, _, mirror = saw.rotation.partition("+")
    x, y = {"none": (x, y), "90": (height - y, x), "180": (width - x, height - y), "270": (y, width - x)}[turn]
    return (_upright(saw)[0] - x if mirror else x), y


def _turn_back(x: float, y: float, saw: Saw) -> tuple[float, float]:
    width, height = saw.decoded
    turn, _, mirror = saw.rotation.partition("+")
    x = _upright(saw)[0] - x if mirror else x
    return {"none": (x, y), "90": (y, height - x), "180": (width - x, height - y), "270": (width - y, x)}[turn]


def _ordered(first: tuple[float, float], second: tuple[float, float]) -> Box:
    return min(first[0], second[0]), min(first[1], second[1]), max(first[0], second[0]), max(first[1], second[1])


def _clamp(fraction: float) -> float:
    return min(1.0, max(0.0, fraction))
