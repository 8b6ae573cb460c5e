"""How well a text was read: character and word error rates, and lines that are exactly right.

    CER = edits between characters / characters of the truth        WER = the same for words

An edit is an insertion, a deletion or a substitution of one (Levenshtein). Rates over many pages divide the sums, so a page
counts by its length; they can exceed 1, when a model writes much that is not there. White space at the ends of lines and empty
lines at the ends of a text do not count; nothing else is normalized, neither case nor Unicode form. rapidfuzz does the counting;
it comes with the extra `kaminari-core[eval]`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from kaminari_core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Score:
    """Edits and lengths of one text or, added up, of many."""

    character_edits: int = 0
    characters: int = 0
    word_edits: int = 0
    words: int = 0
    exact_lines: int = 0
    lines: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.character_edits + other.character_edits,
            self.characters + other.characters,
            self.word_edits + other.word_edits,
            self.words + other.words,
            self.exact_lines + other.exact_lines,
            self.lines + other.lines,
        )

    @property
    def cer(self) -> float:
        """Character error rate."""
        return self.character_edits / max(1, self.characters)

    @property
    def wer(self) -> float:
        """Word error rate."""
        return self.word_edits / max(1, self.words)

    @property
    def exact(self) -> float:
        """Share of the truth's lines that were read exactly."""
        return self.exact_lines / max(1, self.lines)


def score(read: str, truth: str) -> Score:
    """Compare what was read with what is there.

    A line counts as exact when it stands in the longest common subsequence of both texts' lines, so one that is left out makes
    no others wrong. Raises UsageError when rapidfuzz is missing.
    """
    ours, theirs = _lines(read), _lines(truth)
    return Score(
        _edits("\n".join(ours), "\n".join(theirs)),
        len("\n".join(theirs)),
        _edits(_words(ours), _words(theirs)),
        len(_words(theirs)),
        _common(ours, theirs),
        len(theirs),
    )


def total(scores: Iterable[Score]) -> Score:
    """The sum of scores, whose rates are those of all pages together."""
    return sum(scores, Score())


def check_available() -> None:
    """Raise UsageError when rapidfuzz is missing."""
    _edits("", "")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _words(lines: Sequence[str]) -> list[str]:
    return [word for line in lines for word in line.split()]


def _edits(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> int:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise UsageError("measuring quality needs rapidfuzz: pip install 'kaminari-core[eval]'") from None
    return int(Levenshtein.distance(ours, theirs))


def _common(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> int:
    from rapidfuzz.distance import LCSseq

    return int(LCSseq.similarity(ours, theirs))
