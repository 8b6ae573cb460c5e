"""Tables in a reply, written as HTML or as Markdown, as cells and as plain lines.

As plain text a row is a line, its cells joined by single spaces, as the truths of sets write tables too: so the error rate
of a text does not depend on the notation that a model chose for tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

_HTML = re.compile(r"<table\b.*?(?:</table\s*>|\Z)", re.IGNORECASE | re.DOTALL)
_RULE = re.compile(r"\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")
_BAR = re.compile(r"(?<!\\)\|")


@dataclass(slots=True)
class Cell:
    """A cell's text and how many columns and rows it spans."""

    text: str = ""
    columns: int = 1
    rows: int = 1


@dataclass(slots=True)
class Table:
    """Cells row by row."""

    rows: list[list[Cell]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """A line for each row."""
        return "\n".join(" ".join(cell.text for cell in row if cell.text) for row in self.rows)


def find_tables(text: str) -> list[Table]:
    """The tables in a text, in order."""
    return [part for part in _parts(text) if isinstance(part, Table)]


def plain(text: str) -> str:
    """A text with its tables as plain lines."""
    return "".join(part.text if isinstance(part, Table) else part for part in _parts(text))


def parse_html(markup: str) -> Table:
    """The table that a piece of HTML writes. Heads and bodies are not told apart, what is left open is closed, and a table
    inside a cell is read as its text.
    """
    reader = _Reader()
    reader.feed(markup)
    reader.close()
    return reader.table


def _parts(text: str) -> Iterator[str | Table]:
    end = 0
    for match in _HTML.finditer(text):
        yield from _markdown_parts(text[end : match.start()])
        yield parse_html(match[0])
        end = match.end()
    yield from _markdown_parts(text[end:])


def _markdown_parts(text: str) -> Iterator[str | Table]:
    """Markdown's tables: a line with bars, a rule with as many columns, and the lines with bars that follow."""
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        head = _cells(lines[number])
        if number + 1 == len(lines) or not _is_rule(lines[number + 1], len(head)):
            yield lines[number]
            number += 1
            continue
        table = Table([head])
        number += 2
        while number < len(lines) and "|" in lines[number]:
            table.rows.append(_cells(lines[number]))
            number += 1
        yield table
        if number < len(lines):
            yield "\n"


def _is_rule(line: str, columns: int) -> bool:
    return "|" in line and _RULE.fullmatch(line) is not None and len(_cells(line)) == columns


def _cells(line: str) -> list[Cell]:
    inner = line.strip().removeprefix("|")
    if inner.endswith("|") and not inner.endswith("\\|"):
        inner = inner[:-1]
    return [Cell(" ".join(text.replace("\\|", "|").split())) for text in _BAR.split(inner)]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.table = Table()
        self._depth = 0
        self._cell: Cell | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._depth += 1
        if self._depth > 1:
            self.handle_data(" ")
        elif tag == "tr":
            self._end_cell()
            self.table.rows.append([])
        elif tag in ("td", "th"):
            self._end_cell()
            if not self.table.rows:
                self.table.rows.append([])
            spans = dict(attrs)
            self._cell = Cell("", _span(spans.get("colspan")), _span(spans.get("rowspan")))
            self.table.rows[-1].append(self._cell)
        elif tag == "br":
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._depth -= 1
        if self._depth <= 1 and tag in ("td", "th", "tr", "table"):
            self._end_cell()

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.text += data

    def close(self) -> None:
        super().close()
        self._end_cell()

    def _end_cell(self) -> None:
        if self._cell is not None:
            self._cell.text = " ".join(self._cell.text.split())
        self._cell = None


def _span(value: str | None) -> int:
    return int(value) if value and value.isdecimal() and int(value) else 1
