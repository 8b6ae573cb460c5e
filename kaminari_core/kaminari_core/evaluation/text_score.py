"""How well a text was read: character and word error rates, and lines that are exactly right.

    CER = edits between characters / characters of the truth        WER = the same for words

An edit is an insertion, a deletion or a substitution of one (Levenshtein). Rates over many pages divide the sums, so a page
counts by its length; they can exceed 1, when a model writes much that is not there. White space at the ends of lines and empty
lines at the ends of a text do not count; nothing else is normalized, neither case nor Unicode form. jiwer counts the edits,
rapidfuzz the lines in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from kaminari_core.evaluation.extra import need


@dataclass(frozen=True, slots=True)
class TextScore:
    """Edits and lengths of one text or, added up, of many.

    `inserted`, `deleted` and `substituted` count characters that are read but not there, there but not read, and read as
    another; `word_edits` are all three kinds for words.
    """

    inserted: int = 0
    deleted: int = 0
    substituted: int = 0
    characters: int = 0
    word_edits: int = 0
    words: int = 0
    exact_lines: int = 0
    lines: int = 0

    def __add__(self, other: TextScore) -> TextScore:
        return TextScore(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def character_edits(self) -> int:
        """Edits between characters."""
        return self.inserted + self.deleted + self.substituted

    @property
    def cer(self) -> float:
        """Character error rate; edits alone where the truths are empty."""
        return self.character_edits / max(1, self.characters)

    @property
    def wer(self) -> float:
        """Word error rate."""
        return self.word_edits / max(1, self.words)

    @property
    def exact(self) -> float:
        """Share of the truth's lines that were read exactly."""
        return self.exact_lines / max(1, self.lines)


def score_text(read: str, truth: str) -> TextScore:
    """Compare what was read with what is there.

    A line counts as exact when it stands in the longest common subsequence of both texts' lines, so one that is left out makes
    no others wrong. Raises UsageError when a library of the extra is missing.
    """
    jiwer = need("jiwer")
    ours, theirs = text_lines(read), text_lines(truth)
    characters = jiwer.process_characters("\n".join(theirs), "\n".join(ours))
    # jiwer separates words at spaces alone.
    words = jiwer.process_words(" ".join(truth.split()), " ".join(read.split()))
    return TextScore(
        inserted=characters.insertions,
        deleted=characters.deletions,
        substituted=characters.substitutions,
        characters=_length(characters),
        word_edits=words.insertions + words.deletions + words.substitutions,
        words=_length(words),
        exact_lines=int(need("rapidfuzz.distance").LCSseq.similarity(ours, theirs)),
        lines=len(theirs),
    )


def total(scores: Iterable[TextScore]) -> TextScore:
    """The sum of scores, whose rates are those of all pages together."""
    return sum(scores, TextScore())


def text_lines(text: str) -> list[str]:
    """The lines that count: without white space at their ends, and without empty ones at the ends of the text."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _length(measured: Any) -> int:
    """The length of the truth: every unit of it is right, substituted or deleted."""
    return int(measured.hits + measured.substitutions + measured.deletions)
