"""Which pages of a document are wanted: `1-3,7`, as people write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kaminari_core.errors import DocumentError, RequestError

_RANGE = re.compile(r"(?P<first>[0-9]{1,9})(?P<to>-(?P<last>[0-9]{1,9})?)?")


@dataclass(frozen=True, slots=True)
class PageSelection:
    """Ranges of page numbers, both ends included; a last page of None is the end of the document. None at all is every page."""

    ranges: tuple[tuple[int, int | None], ...] = ()

    @classmethod
    def parse(cls, text: str, *, param: str = "pages") -> PageSelection:
        """Read `1-3,7` or `4-` (to the end). Raises RequestError with `param` for what is no such list."""
        ranges: list[tuple[int, int | None]] = []
        for part in text.split(","):
            found = _RANGE.fullmatch(part.strip())
            first = int(found["first"]) if found else 0
            last = None if found and found["to"] and not found["last"] else int(found["last"] or first) if found else 0
            if first < 1 or (last is not None and last < first):
                raise RequestError(
                    f"{param} is {text!r}, but must be page numbers from 1 on and ranges of them, such as 1-3,7 or 4-",
                    param=param,
                )
            ranges.append((first, last))
        return cls(tuple(ranges))

    def numbers(self, count: int, name: str) -> list[int]:
        """The wanted ones of `count` pages, each once, in the order of the document.

        A range may reach beyond the end. Raises DocumentError, with `name` as its param, when none of the pages is there.
        """
        if not self.ranges:
            return list(range(1, count + 1))
        wanted: set[int] = set()
        for first, last in self.ranges:
            wanted.update(range(first, min(count, count if last is None else last) + 1))
        if not wanted:
            has = "1 page" if count == 1 else f"{count} pages"
            raise DocumentError(
                f"{name}: it has {has}, so none of the pages {self} is there", param=name, code="no_such_page"
            )
        return sorted(wanted)

    def __str__(self) -> str:
        return ",".join(
            f"{first}-" if last is None else str(first) if first == last else f"{first}-{last}"
            for first, last in self.ranges
        )
