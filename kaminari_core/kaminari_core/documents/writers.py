"""Where `kaminari read` puts its results: in a folder, or on stdout in the order of the pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from kaminari_core.documents.folder import Format, ResultFolder
from kaminari_core.documents.job import PageKey
from kaminari_core.documents.records import Record, as_line

HEADINGS: Final = {"text": "==> {} <==", "markdown": "<!-- {} -->"}


class FolderWriter:
    """Writes each page into a folder as soon as it is done."""

    def __init__(self, folder: ResultFolder) -> None:
        self._folder = folder

    def done(self, key: PageKey) -> Record | None:
        """See Output."""
        return self._folder.done((key.path, key.page), key.id)

    def write(self, index: int, record: Record) -> None:
        """See Output."""
        self._folder.write(record)


class StreamWriter:
    """Writes to a stream, in the order of the pages: what is done early waits for those before it.

    Text and Markdown have a heading for each page where `several` are read; a page that failed has no text and is left to the
    messages. JSON is one list.
    """

    def __init__(self, write: Callable[[str], None], format: Format, *, several: bool) -> None:
        self._write, self._format, self._several = write, format, several
        self._waiting: dict[int, Record] = {}
        self._next = 0

    def done(self, key: PageKey) -> Record | None:
        """See Output: there is no earlier run."""
        return None

    def write(self, index: int, record: Record) -> None:
        """See Output."""
        self._waiting[index] = record
        while self._next in self._waiting:
            self._put(self._waiting.pop(self._next))
            self._next += 1

    def close(self) -> None:
        """Write what is waiting for pages that will not come, and the end of the list."""
        for index in sorted(self._waiting):
            self._put(self._waiting.pop(index))
            self._next += 1
        if self._format == "json":
            self._write("\n]\n" if self._next else "[]\n")

    def _put(self, record: Record) -> None:
        if self._format == "jsonl":
            self._write(as_line(record) + "\n")
        elif self._format == "json":
            self._write((",\n" if self._next else "[\n") + json.dumps(record, ensure_ascii=False, indent=1))
        elif record["status"] != "failed":
            if self._several:
                blank = " (blank)" if record["status"] == "blank" else ""
                self._write(("\n" if self._next else "") + HEADINGS[self._format].format(title(record) + blank) + "\n")
            if record["text"]:
                self._write(record["text"] + "\n")


def title(record: Record) -> str:
    """What a page is called: its path, and its number where there are several."""
    return f"{record['path']}, page {record['page']}" if record["pages"] > 1 else str(record["path"])
