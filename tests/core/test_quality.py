"""Error rates against values counted by hand."""

from __future__ import annotations

import sys

import pytest

from kaminari_core.errors import UsageError
from kaminari_core.quality import Score, score, total


@pytest.mark.parametrize(
    ("read", "truth", "expected"),
    [
        ("same\ntext", "same\ntext", Score(0, 9, 0, 2, 2, 2)),
        # kitten, sitting: two substitutions and an insertion (Levenshtein's textbook pair).
        ("kitten", "sitting", Score(3, 7, 1, 1, 0, 1)),
        ("", "two words", Score(9, 9, 2, 2, 0, 1)),
        ("one\nthree", "one\ntwo\nthree", Score(4, 13, 1, 3, 2, 3)),
        ("  one  \n\n", "one", Score(0, 3, 0, 1, 1, 1)),
        ("One", "one", Score(1, 3, 1, 1, 0, 1)),
        ("a  b", "a b", Score(1, 3, 0, 2, 0, 1)),
    ],
)
def test_edits_and_lines_are_counted(read: str, truth: str, expected: Score) -> None:
    assert score(read, truth) == expected


def test_rates_of_many_pages_divide_the_sums() -> None:
    # A wrong letter in a page of 1 and none in a page of 99 is 1 %, not the mean of 100 % and 0 %.
    both = total([score("x", "y"), score("a" * 99, "a" * 99)])
    assert both.cer == 0.01
    assert both.exact == 0.5


def test_without_rapidfuzz_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    with pytest.raises(UsageError, match=r"pip install 'kaminari-core\[eval\]'"):
        score("a", "b")
