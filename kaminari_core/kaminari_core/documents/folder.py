"""The folder that `kaminari read --out` writes: a file for each page, and `pages.jsonl`, which knows them all.

Both are written as soon as a page is done, first the file, then the line. The file is complete before it has its name, and both
are on the disk before the next page is taken, so whatever ends the program, a page is either there or it is not, and `--resume`
reads exactly those that are not. A line that was cut off by the end of the program is no line.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kaminari_core.documents.records import Record, as_line
from kaminari_core.errors import UsageError

logger = logging.getLogger(__name__)
Format = Literal["text", "markdown", "json", "jsonl"]
SUFFIX: Mapping[Format, str] = {"text": ".txt", "markdown": ".md", "json": ".json"}
"""Of the files of single pages; `jsonl` has none, for there `pages.jsonl` is what was asked for."""
JOURNAL = "pages.jsonl"
NEEDED = frozenset({"id", "sha256", "status", "pages", "text"})
"""What a line of it must have, beside path and page."""
Place = tuple[str, int]
"""The path of a document and the number of a page."""


class ResultFolder:
    """A folder of results that is open for writing. Make with `open_folder`."""

    def __init__(self, path: Path, format: Format, records: Mapping[Place, Record]) -> None:
        self._path, self._format = path, format
        self._records = dict(records)
        self._journal = path / JOURNAL
        self._rewrite(self._records.values())

    def done(self, place: Place, identity: str) -> Record | None:
        """The record of a page that was read or found blank before, under the same identity; its file is there after this."""
        record = self._records.get(place)
        if record is None or record["id"] != identity or record["status"] == "failed":
            return None
        self._write_file(record)
        return record

    def write(self, record: Record) -> None:
        """Write what became of a page. What an earlier run wrote for its place is replaced, or removed if the page failed."""
        place = record["path"], record["page"]
        before = self._records.get(place)
        if before is not None:
            self._remove_file(before, unless=self._file(record) if record["status"] != "failed" else None)
        self._write_file(record)
        # Before the line, so that an interrupt between the two does not make `finish` drop what is on the disk.
        self._records[place] = record
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(as_line(record) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

    def finish(self, order: Iterable[Place], hashes: Mapping[str, str]) -> None:
        """Put the lines in the order of the pages, and drop those of pages that a changed file lost (`hashes`, by path)."""
        kept = dict.fromkeys(place for place in order if place in self._records)
        for place, record in self._records.items():
            if hashes.get(place[0], record["sha256"]) == record["sha256"]:
                kept.setdefault(place)
            elif place not in kept:
                self._remove_file(record)
        self._rewrite(self._records[place] for place in kept)

    def _rewrite(self, records: Iterable[Record]) -> None:
        _write_whole(self._journal, "".join(as_line(record) + "\n" for record in records))

    def _file(self, record: Record) -> Path | None:
        """The file of a page that has a text; a document of several pages has their numbers in the names."""
        if self._format == "jsonl":
            return None
        number = f".page-{record['page']:04d}" if record["pages"] > 1 else ""
        return self._path / f"{record['path']}{number}{SUFFIX[self._format]}"

    def _write_file(self, record: Record) -> None:
        file = self._file(record)
        if file is None:
            return
        if self._format == "json":
            _write_whole(file, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
        elif record["status"] != "failed":
            _write_whole(file, record["text"] + "\n" if record["text"] else "")

    def _remove_file(self, record: Record, unless: Path | None = None) -> None:
        file = self._file(record)
        if file is not None and file != unless:
            file.unlink(missing_ok=True)


@contextmanager
def open_folder(path: Path, format: Format, *, resume: bool) -> Iterator[ResultFolder]:
    """A folder for results, made where there is none, for this program alone until it ends.

    Raises UsageError when it cannot be had, is in use by another run, or holds the results of an earlier one that is not to be
    resumed.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            journal = path / JOURNAL
            if journal.exists() and not resume:
                raise UsageError(
                    f"{str(path)!r} holds the results of an earlier run ({JOURNAL}); add --resume to go on with it, or give "
                    "another --out"
                )
            yield ResultFolder(path, format, _read_journal(journal))
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(f"results cannot be written to {str(path)!r}: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"another run writes to {str(path)!r}; wait for it, or give another --out") from None
    finally:
        os.close(folder)


def _read_journal(journal: Path) -> dict[Place, Record]:
    """The last record of each page. What is no record is left out, so that its page is read again."""
    records: dict[Place, Record] = {}
    if not journal.exists():
        return records
    for number, line in enumerate(journal.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            place = record["path"], record["page"]
            if not record.keys() >= NEEDED:
                raise KeyError(*NEEDED - record.keys())
            records[place] = record
        except (ValueError, KeyError, TypeError):
            logger.warning("line %d of %s is no record of a page; what it was about is read again", number, journal)
    return records


def _write_whole(file: Path, text: str) -> None:
    """Write a file so that it is there whole, on the disk, or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
