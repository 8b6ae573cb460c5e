"""The boxes in a reply, and where they lie in the uploaded picture.

    text -> JSON objects with a box and plain boxes, in order -> boxes.to_file -> GroundedBox

Three ways of writing a box are known: Qwen3-VL's JSON, `{"bbox_2d": [x1, y1, x2, y2], "label": "..."}`, alone, in lists, inside
other objects or in a code fence; four numbers in brackets; and two points, `(x1,y1),(x2,y2)`, as Qwen2-VL has them between tokens
that are not part of the text. A reply that was cut short loses the box it was cut in.

A box is right or it is not given: numbers beyond 0 to 1000 are no thousandths, and with several pictures nothing says which
one is meant, so neither is mapped to a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kaminari_core.boxes import SCALE, Box, to_file
from kaminari_core.evidence.facts import GroundedBox
from kaminari_core.flow import Saw

BOX_KEYS: Final = ("bbox_2d", "bbox")
LABEL_KEYS: Final = ("label", "text", "text_content", "name")

_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_POINTS = re.compile(rf"\({_NUMBER},{_NUMBER}\)\s*,?\s*\({_NUMBER},{_NUMBER}\)")
_OPENING = re.compile(r"[\[{(]")
_BETWEEN = " \t:;,-*<>|\"'`"


def find_boxes(text: str, saw: Sequence[Saw]) -> tuple[GroundedBox, ...]:
    """All boxes that a reply writes, in the order of the text, with their places in the one picture that was seen."""
    if len(saw) != 1:
        return tuple(GroundedBox(label, box, None, None) for label, box in _written(text))
    return tuple(
        GroundedBox(label, box, to_file(box, saw[0]) if _in_scale(box) else None, 0) for label, box in _written(text)
    )


def _written(text: str) -> Iterator[tuple[str | None, Box]]:
    decoder = json.JSONDecoder()
    position = said = 0
    while opening := _OPENING.search(text, position):
        position = opening.start()
        found: list[tuple[str | None, Box]] = []
        if points := _POINTS.match(text, position):
            left, top, right, bottom = map(float, points.groups())
            found, end = [(None, (left, top, right, bottom))], points.end()
        else:
            try:
                value, end = decoder.raw_decode(text, position)
                found = list(_boxes(value))
            except ValueError:
                position += 1
                continue
            except RecursionError:
                return  # nested deeper than any list of boxes; looking into it again and again would take seconds
        if found:
            before = text[said:position].rpartition("\n")[2].strip(_BETWEEN) or None
            yield from ((label or before if len(found) == 1 else label, box) for label, box in found)
            said = end
        position = end


def _boxes(value: Any) -> Iterator[tuple[str | None, Box]]:
    """The boxes inside a JSON value. Four numbers alone are one, but not under a key that is not that of a box."""
    if (box := _box(value)) is not None:
        yield None, box
    elif isinstance(value, list):
        for item in value:
            yield from _boxes(item)
    elif isinstance(value, dict):
        label = next((value[key] for key in LABEL_KEYS if isinstance(value.get(key), str)), None)
        for key, inner in value.items():
            if key in BOX_KEYS:
                yield from ((label, box) for _, box in _boxes(inner))
            elif not _is_numbers(inner):
                yield from _boxes(inner)


def _box(value: Any) -> Box | None:
    if not _is_numbers(value) or len(value) != 4:
        return None
    left, top, right, bottom = map(float, value)
    return left, top, right, bottom


def _is_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of nothing but such lists."""
    if not isinstance(value, list) or not value:
        return False
    return all(_is_numbers(item) or (isinstance(item, int | float) and type(item) is not bool) for item in value)


def _in_scale(box: Box) -> bool:
    return all(0 <= number <= SCALE for number in box)
