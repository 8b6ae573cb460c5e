"""Which lines count as right, and what a temperature is worth on lines that it was not fitted on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kaminari_core.documents.pages import PageResult
from kaminari_core.errors import UsageError
from kaminari_core.evaluation.calibrate import calibrate, judged_lines, table
from kaminari_core.evaluation.reading import Outcome
from kaminari_core.evaluation.sample import Sample
from kaminari_core.evidence.facts import LineConfidence


def outcome(truth: str | None, *lines: tuple[str, float]) -> Outcome:
    """A page that was read as these lines, each as sure as said by every measure."""
    sure = tuple(LineConfidence(index, text, value, value, value, None) for index, (text, value) in enumerate(lines))
    text = "\n".join(text for text, _ in lines)
    page = PageResult(name="a", page=1, pages=1, status="read", seconds=0.0, text=text, lines=sure)
    return Outcome(Sample("a", Path("a.png"), truth), page)


def test_a_line_is_right_when_it_stands_in_order() -> None:
    found = judged_lines(outcome("one\ntwo\nthree", ("one", 0.9), ("tvo", 0.4), ("three", 0.8), ("one", 0.7)))
    assert [line.right for line in found] == [True, False, True, False]
    assert judged_lines(outcome(None, ("one", 0.9))) == []


def test_the_temperature_of_one_half_is_reported_on_the_other() -> None:
    # Of lines with 0.9, three in four are right, in both halves: the temperature takes the log-odds of 0.9 to those of 0.75.
    page = outcome("a\nb\nc", ("a", 0.9), ("b", 0.9), ("c", 0.9), ("x", 0.9))
    [found, *others] = calibrate([page, page])
    assert found.temperature == pytest.approx(math.log(9) / math.log(3))
    assert (found.fitted, found.lines, found.accuracy) == (4, 4, 0.75)
    assert found.error == (pytest.approx(0.15), pytest.approx(0.0, abs=1e-6))
    assert found.loss[0] == pytest.approx(-(0.75 * math.log(0.9) + 0.25 * math.log(0.1)))
    assert found.loss[1] == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert [each.measure for each in (found, *others)] == ["mean", "minimum", "joint"]
    assert "| mean | 2.00 | 0.150 | 0.000 |" in table([found, *others])


def test_a_half_without_lines_is_told() -> None:
    with pytest.raises(UsageError, match="lines in both halves"):
        calibrate([outcome("a", ("a", 0.9)), outcome("b")])
