"""From what was read to scores of a page, and from those of the pages to one of the set.

Every page counts: one that failed was read as nothing, and so is one that the model left blank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kaminari_core.evaluation.anls import contains, similarity
from kaminari_core.evaluation.fields import FieldScore, fields_of, normalized, score_fields
from kaminari_core.evaluation.interval import bootstrap
from kaminari_core.evaluation.sample import Sample
from kaminari_core.evaluation.tables import find_tables, parse_html, plain
from kaminari_core.evaluation.teds import score_tables
from kaminari_core.evaluation.text_score import TextScore, score_text, total


@dataclass(frozen=True, slots=True)
class PageScore:
    """The scores of a page, None where its sample has no truth of that kind.

    `anls` and `teds` are sums over the page's answers or fields and over its tables, which `answers` and `tables` count;
    `contained` says whether the reply contains a right answer. `tables_read` are those that the reply writes as tables.
    """

    text: TextScore | None = None
    fields: FieldScore | None = None
    anls: float = 0.0
    answers: int = 0
    contained: bool | None = None
    teds: float = 0.0
    tables: int = 0
    tables_read: int = 0


@dataclass(frozen=True, slots=True)
class Quality:
    """The scores of all pages together, None where no page has a truth of that kind.

    `interval` is the bootstrap interval of the character error rate.
    """

    pages: int
    read: int
    blank: int
    failed: int
    text: TextScore | None
    interval: tuple[float, float] | None
    fields: FieldScore | None
    anls: float | None
    contained: float | None
    teds: float | None
    tables: int
    tables_read: int


def score_page(sample: Sample, text: str) -> PageScore:
    """Score what was read on a page. Raises UsageError when a library of the extra is missing."""
    anls, answers = _anls(sample, text)
    found = find_tables(text) if sample.tables else []
    teds, tables = score_tables(found, [parse_html(markup) for markup in sample.tables])
    return PageScore(
        text=None if sample.text is None else score_text(plain(text), plain(sample.text)),
        fields=score_fields(text, sample.fields) if sample.fields else None,
        anls=anls,
        answers=answers,
        contained=contains(text, sample.answers) if sample.answers else None,
        teds=teds,
        tables=tables,
        tables_read=len(found),
    )


def summarize(pages: Sequence[tuple[str, PageScore]], seed: int = 0) -> Quality:
    """The quality of pages, given as status and score. `seed` is that of the bootstrap."""
    statuses = [status for status, _ in pages]
    scores = [score for _, score in pages]
    texts = [score.text for score in scores if score.text is not None]
    fields = [score.fields for score in scores if score.fields is not None]
    answered = [score.contained for score in scores if score.contained is not None]
    return Quality(
        pages=len(pages),
        read=statuses.count("read"),
        blank=statuses.count("blank"),
        failed=statuses.count("failed"),
        text=total(texts) if texts else None,
        interval=bootstrap([text.character_edits for text in texts], [text.characters for text in texts], seed=seed),
        fields=sum(fields, FieldScore()) if fields else None,
        anls=_ratio((score.anls, score.answers) for score in scores),
        contained=sum(answered) / len(answered) if answered else None,
        teds=_ratio((score.teds, score.tables) for score in scores),
        tables=sum(score.tables for score in scores),
        tables_read=sum(score.tables_read for score in scores),
    )


def _anls(sample: Sample, text: str) -> tuple[float, int]:
    """The sum of similarities of a page: of its answer, or of its fields, one that is not written counting 0."""
    if sample.answers:
        return similarity(text, sample.answers), 1
    written, expected = fields_of(text), normalized(sample.fields.items())
    return sum(similarity(written.get(name, ""), [value]) for name, value in expected.items()), len(expected)


def _ratio(pairs: Iterable[tuple[float, int]]) -> float | None:
    sums, counts = zip(*pairs, strict=True)
    return sum(sums) / sum(counts) if sum(counts) else None
