"""One run of `kaminari read`: files in, every page of them out exactly once, as read, blank or failed.

    files -> documents -> pages -> those that an earlier run has done | the engine -> Output

The engine is opened when the first page needs it, so resuming a run that was complete loads no model.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kaminari_core.config import EngineConfig
from kaminari_core.documents.batch import BatchReader, Task
from kaminari_core.documents.document import DEFAULT_DPI, Document, open_document
from kaminari_core.documents.pages import PageReader, PageResult, Question, check_pictures
from kaminari_core.documents.records import Record, page_id, page_record
from kaminari_core.documents.selection import PageSelection
from kaminari_core.documents.sources import HEAD, SourceFile, printable
from kaminari_core.errors import DocumentError, KaminariError, UsageError
from kaminari_core.images import sniff
from kaminari_core.serving import Serving

LARGEST_FILE: Final = 2**30
"""Bytes of one file, which is in memory while its pages are read."""


@dataclass(frozen=True, slots=True)
class PageKey:
    """A page among all of a run: its number in their order, and what its record is kept under."""

    index: int
    path: str
    page: int
    sha256: str
    id: str


class Output(Protocol):
    """Where results go."""

    def done(self, key: PageKey) -> Record | None:
        """The record of a page that need not be read again."""
        ...

    def write(self, index: int, record: Record) -> None:
        """Take what became of a page; pages come in any order."""
        ...


@dataclass(slots=True)
class Tally:
    """How many pages went in and what became of them.

    `before` are those of an earlier run, `cut` those that a limit or a loop ended.
    """

    taken: int = 0
    read: int = 0
    blank: int = 0
    failed: int = 0
    before: int = 0
    cut: int = 0

    def count(self, record: Record) -> None:
        """Count what became of a page."""
        status = record["status"]
        setattr(self, status, getattr(self, status) + 1)
        self.cut += record["finish_reason"] == "length" or record["finish_detail"] == "loop"

    @property
    def done(self) -> int:
        """Pages that something became of."""
        return self.read + self.blank + self.failed

    def __str__(self) -> str:
        pages = "1 page" if self.done == 1 else f"{self.done} pages"
        before = f" ({self.before} of them before)" if self.before else ""
        cut = f"; {self.cut} not read to the end" if self.cut else ""
        return f"{pages} = {self.read} read + {self.blank} blank + {self.failed} failed{before}{cut}"


@dataclass(slots=True)
class ReadJob:
    """What is to be read, and how. `settings` are those that a page's text depends on."""

    sources: Sequence[SourceFile]
    selection: PageSelection
    dpi: float
    question: Question
    config: EngineConfig
    settings: Mapping[str, Any]
    output: Output
    tally: Tally = field(default_factory=Tally)
    hashes: dict[str, str] = field(default_factory=dict)
    """The content of each file that could be read, by its path."""
    order: list[tuple[str, int]] = field(default_factory=list)
    """The path and number of every page, in the order of the run."""
    _settled: list[Record] = field(default_factory=list)

    def run(self, open_engine: Callable[[], AbstractContextManager[Serving]]) -> Generator[Record, None, None]:
        """Read all pages; yields what became of each, once it is written. `open_engine` is called when a page needs a model."""
        tasks = self._tasks()
        first = next(tasks, None)
        yield from self._take_settled()
        if first is not None:
            with open_engine() as engine:
                check_pictures(engine.shape, engine.name)
                reader = PageReader(self.question, engine.config, engine.shape)
                for key, result in BatchReader(engine, reader).read(itertools.chain([first], tasks)):
                    self._settle(key.index, self._record(key, result))
                    yield from self._take_settled()
        yield from self._take_settled()
        assert self.tally.taken == self.tally.done, f"pages were lost or counted twice: {self.tally}"

    def _tasks(self) -> Iterator[Task[PageKey]]:
        """The pages that have to be read. The others are settled on the way."""
        for source in self.sources:
            path = printable(source.key)
            try:
                data = _read_file(source, path)
                self.hashes[path] = hashlib.sha256(data).hexdigest()
                document = open_document(data, path, self.config, self.dpi)
                numbers = self.selection.numbers(document.pages, path)
            except KaminariError as error:
                key = self._key(path, 1, "")
                self._settle(key.index, self._record(key, _unopened(path, error)))
                continue
            yield from self._unread(document, numbers)

    def _unread(self, document: Document, numbers: Sequence[int]) -> Iterator[Task[PageKey]]:
        for number in numbers:
            key = self._key(document.name, number, document.format)
            record = self.output.done(key)
            if record is None:
                yield Task(key, document, number)
            else:
                self.tally.before += 1
                self._settle(key.index, record, written=True)

    def _key(self, path: str, page: int, format: str) -> PageKey:
        """Count a page that was found, and name it."""
        index = self.tally.taken
        self.tally.taken += 1
        self.order.append((path, page))
        sha256 = self.hashes.get(path, "")
        settings = {**self.settings, "dpi": self.dpi if format == "PDF" else DEFAULT_DPI}
        return PageKey(index, path, page, sha256, page_id(path, sha256, page, settings))

    def _record(self, key: PageKey, result: PageResult) -> Record:
        return {**page_record(result), "sha256": key.sha256, "id": key.id}

    def _settle(self, index: int, record: Record, *, written: bool = False) -> None:
        if not written:
            self.output.write(index, record)
        self.tally.count(record)
        self._settled.append(record)

    def _take_settled(self) -> list[Record]:
        settled, self._settled = self._settled, []
        return settled


def count_pages(sources: Sequence[SourceFile], selection: PageSelection, config: EngineConfig) -> int:
    """How many pages a run will have, for what it shows of its progress. Raises UsageError when a library is missing for any.

    A file that cannot be read is one page, which will fail.
    """
    total = 0
    for source in sources:
        name = printable(source.key)
        try:
            with source.path.open("rb") as opened:
                several = sniff(opened.read(HEAD)) in ("PDF", "TIFF")
            pages = open_document(_read_file(source, name), name, config).pages if several else 1
            total += len(selection.numbers(pages, name))
        except UsageError:
            raise
        except (KaminariError, OSError):
            total += 1
    return total


def _unopened(path: str, error: KaminariError) -> PageResult:
    """What became of a file that is no document: it counts as a page."""
    return PageResult(name=path, page=1, pages=1, status="failed", seconds=0.0, error=error)


def _read_file(source: SourceFile, name: str) -> bytes:
    try:
        size = source.path.stat().st_size
        if size > LARGEST_FILE:
            raise DocumentError(
                f"{name}: the file has {size:,} bytes, more than the {LARGEST_FILE:,} allowed; split it",
                param=name,
                code="file_too_large",
            )
        return source.path.read_bytes()
    except OSError as error:
        raise DocumentError(
            f"{name}: the file cannot be read: {error.strerror}", param=name, code="unreadable_file"
        ) from error
