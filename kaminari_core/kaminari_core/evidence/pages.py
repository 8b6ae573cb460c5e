"""How many pages the file of a picture has, told from its bytes without decoding any of them.

Only TIFF pictures have several; the frames of an animation are none. The chain of directories is walked here instead of by
Pillow's reader, because a file of a few megabytes can have a million of them.
"""

from __future__ import annotations

import struct
from typing import Final

MOST: Final = 10_000
"""Pages beyond this are not counted."""
SUBFILE_TYPE, REDUCED, SHORT = 254, 1, 3


def count_pages(data: bytes) -> int:
    """The pages of a picture's file, at least 1. Smaller copies of other pages are none; what is damaged ends the count."""
    if data[:4] in (b"II*\0", b"MM\0*"):
        order, offset, sizes = _order(data), 4, ("H", "I", 12)
    elif data[:4] in (b"II+\0", b"MM\0+"):
        order, offset, sizes = _order(data), 8, ("Q", "Q", 20)
    else:
        return 1
    found, seen = 0, set[int]()
    try:
        (place,) = struct.unpack_from(order + sizes[1], data, offset)
        while place and place not in seen and len(seen) < MOST:
            seen.add(place)
            reduced, place = _directory(data, place, order, *sizes)
            found += not reduced
    except struct.error:
        pass  # the file ends before it says that it does: the pages in front of that are there
    return max(1, found)


def _order(data: bytes) -> str:
    return "<" if data[:2] == b"II" else ">"


def _directory(data: bytes, place: int, order: str, count: str, pointer: str, entry: int) -> tuple[bool, int]:
    """Whether the directory at `place` is of a smaller copy, and where the next one is."""
    (entries,) = struct.unpack_from(order + count, data, place)
    first = place + struct.calcsize(order + count)
    (following,) = struct.unpack_from(order + pointer, data, first + entries * entry)
    # Entries are in the order of their tags, and this tag is the lowest there is.
    tag, kind = struct.unpack_from(order + "HH", data, first) if entries else (0, 0)
    if tag != SUBFILE_TYPE:
        return False, following
    value = first + entry - struct.calcsize(order + pointer)
    (flags,) = struct.unpack_from(order + ("H" if kind == SHORT else "I"), data, value)
    return bool(flags & REDUCED), following
