"""Error rates against values counted by hand."""

from __future__ import annotations

import sys

import jiwer
import pytest

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.extra import check_available
from kaminari_core.evaluation.text_score import TextScore, score_text, total


@pytest.mark.parametrize(
    ("read", "truth", "expected"),
    [
        # inserted, deleted, substituted characters, characters; word edits, words; exact lines, lines
        ("same\ntext", "same\ntext", TextScore(0, 0, 0, 9, 0, 2, 2, 2)),
        # kitten, sitting: two substitutions and a letter that was not read (Levenshtein's textbook pair).
        ("kitten", "sitting", TextScore(0, 1, 2, 7, 1, 1, 0, 1)),
        ("", "two words", TextScore(0, 9, 0, 9, 2, 2, 0, 1)),
        ("invented", "", TextScore(8, 0, 0, 0, 1, 0, 0, 0)),
        ("one\nthree", "one\ntwo\nthree", TextScore(0, 4, 0, 13, 1, 3, 2, 3)),
        ("  one  \n\n", "one", TextScore(0, 0, 0, 3, 0, 1, 1, 1)),
        ("One", "one", TextScore(0, 0, 1, 3, 1, 1, 0, 1)),
        ("a  b", "a b", TextScore(1, 0, 0, 3, 0, 2, 0, 1)),
        # A word that is broken over two lines is two words, and a line end is a character like others.
        ("a\nb", "ab", TextScore(1, 0, 0, 2, 2, 1, 0, 1)),
    ],
)
def test_edits_and_lines_are_counted(read: str, truth: str, expected: TextScore) -> None:
    assert score_text(read, truth) == expected


def test_rates_are_those_of_the_library_where_it_counts_alike() -> None:
    # The example of jiwer's documentation.
    reference, hypothesis = "hello world", "hello duck"
    score = score_text(hypothesis, reference)
    assert score.wer == jiwer.wer(reference, hypothesis) == 0.5
    assert score.cer == jiwer.cer(reference, hypothesis)


def test_rates_of_many_pages_divide_the_sums() -> None:
    # A wrong letter in a page of 1 and none in a page of 99 is 1 %, not the mean of 100 % and 0 %.
    both = total([score_text("x", "y"), score_text("a" * 99, "a" * 99)])
    assert both.cer == 0.01
    assert both.exact == 0.5


@pytest.mark.parametrize("module", ["apted", "jiwer", "rapidfuzz"])
def test_without_a_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"needs {module}: pip install 'kaminari-core\[eval\]'"):
        check_available()
