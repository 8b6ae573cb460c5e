"""Where the values of a JSON reply stand in its text.

The json module gives values without their places. Only text that it has accepted is walked here, so the walk checks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_SPACE = " \t\n\r"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A string, number, true, false or null. `path` is its JSON pointer; text[start:stop] is it, of a string what is behind the
    opening quote, up to and with the closing one."""

    path: str
    value: str | float | bool | None
    start: int
    stop: int


def find_json(text: str) -> tuple[Any, int] | None:
    """The object or list that a reply is, bare or in a Markdown code fence, and where it begins; None when it is neither."""
    bare = text.strip()
    if bare.startswith("```") and "\n" in bare:
        bare = bare[bare.index("\n") :].removesuffix("```").strip()
    if not bare.startswith(("{", "[")):
        return None
    try:
        return json.loads(bare), text.index(bare)
    except (ValueError, RecursionError):
        return None


def leaves(text: str) -> list[Leaf]:
    """All values of a reply that is JSON, in the order of the text; none when it is not."""
    found = find_json(text)
    return [] if found is None else list(_walk(text, found[1], ""))


def _walk(text: str, position: int, path: str) -> Iterator[Leaf]:
    """The leaves of the value at `position`. Without recursion, for a model may nest as deep as it likes."""
    outer: list[tuple[str, int]] = []
    """Objects and lists that are open: their path, and of lists the index of the next item (-1 for objects)."""
    while True:
        if text[position] in "{[":
            outer.append((path, -1 if text[position] == "{" else 0))
            position += 1
        elif text[position] in "}]":
            outer.pop()
            position += 1
        else:
            leaf, position = _leaf(text, position, path)
            yield leaf
        if not outer:
            return
        position = _skip(text, position)
        if text[position] in "}]":
            continue
        path, index = outer[-1]
        if index < 0:
            key, position = _DECODER.raw_decode(text, position)
            path += "/" + key.replace("~", "~0").replace("/", "~1")
            position = _skip(text, position)
        else:
            outer[-1] = path, index + 1
            path += f"/{index}"


def _leaf(text: str, position: int, path: str) -> tuple[Leaf, int]:
    value, stop = _DECODER.raw_decode(text, position)
    if isinstance(value, str):
        return Leaf(path, value, position + 1, stop), stop
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        value = float(value)  # what JSON writers take
    return Leaf(path, value, position, stop), stop


def _skip(text: str, position: int) -> int:
    while text[position] in _SPACE + ",:":
        position += 1
    return position
