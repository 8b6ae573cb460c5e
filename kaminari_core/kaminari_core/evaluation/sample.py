"""A page of a set, and what is known to stand on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture with its truths; each is used by the metrics that need it.

    `text` is everything that is to be read, lines joined by newlines, "" for a blank page and None when a set knows no text.
    `question` is asked instead of the task, and any of `answers` is right. `fields` maps names to values, `tables` are HTML.
    Results are shown for each `group` as well. Pages have different names; one picture may be asked several questions.
    """

    name: str
    file: Path
    text: str | None = None
    question: str | None = None
    answers: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    group: str = ""
