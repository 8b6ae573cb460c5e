"""Calibration: bins and errors by hand, the temperature against a search of the likelihood itself, the file."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaminari_core.errors import UsageError
from kaminari_core.evidence.calibration import (
    COLDEST,
    HOTTEST,
    Calibration,
    calibrate,
    expected_calibration_error,
    fit_temperature,
    negative_log_likelihood,
    reliability_bins,
    scale,
)


def test_bins_and_their_error_by_hand() -> None:
    confidences, correct = [0.0, 0.1, 0.35, 0.4, 0.95, 1.0], [0, 0, 1, 0, 1, 1]
    bins = reliability_bins(confidences, correct, 10)
    assert [each.count for each in bins] == [2, 0, 0, 2, 0, 0, 0, 0, 0, 2]
    assert (bins[3].lower, bins[3].upper, bins[3].accuracy) == (0.3, 0.4, 0.5)
    assert bins[3].confidence == pytest.approx(0.375)
    assert (bins[1].confidence, bins[1].accuracy) == (None, None)
    # Two each of gap 0.05, 0.125 and 0.025.
    assert expected_calibration_error(confidences, correct, 10) == pytest.approx((0.05 + 0.125 + 0.025) / 3)


def test_the_likelihood_is_that_of_the_formula() -> None:
    confidences, correct = [0.9, 0.6, 0.2], [1, 0, 0.5]
    losses = [math.log(0.9), math.log(0.4), 0.5 * math.log(0.2) + 0.5 * math.log(0.8)]
    assert negative_log_likelihood(confidences, correct) == pytest.approx(-sum(losses) / 3)
    warm = [scale(confidence, 2.0) for confidence in confidences]
    assert negative_log_likelihood(confidences, correct, 2.0) == pytest.approx(negative_log_likelihood(warm, correct))


def test_scaling_divides_log_odds() -> None:
    assert scale(0.5, 7.0) == 0.5
    assert scale(0.9, 2.0) == pytest.approx(3 / 4), "odds of 9 become odds of 3"
    assert scale(0.75, 0.5) == pytest.approx(0.9)
    assert 0.8 < scale(1.0, 10.0) < 1 == pytest.approx(scale(1.0, 1.0))


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30),
    st.floats(math.log(COLDEST), math.log(HOTTEST)),
)
def test_no_other_temperature_is_likelier(samples: list[tuple[float, bool]], other: float) -> None:
    confidences, correct = [each for each, _ in samples], [float(right) for _, right in samples]
    best = negative_log_likelihood(confidences, correct, fit_temperature(confidences, correct))
    assert best <= negative_log_likelihood(confidences, correct, math.exp(other)) + 1e-9


def test_an_overconfident_reader_is_brought_down_to_what_it_gets_right() -> None:
    """Right with a probability whose log-odds are a third of what is claimed: the fit finds three, the error vanishes."""
    draw = random.Random(7)
    confidences = [1 / (1 + math.exp(-draw.uniform(-6, 9))) for _ in range(20_000)]
    correct = [float(draw.random() < scale(confidence, 3.0)) for confidence in confidences]
    found = calibrate(confidences, correct, "minimum")
    assert found.temperature == pytest.approx(3.0, rel=0.1)
    assert found.error_before > 0.1
    assert found.error_after < 0.02
    assert found.apply(0.99) == scale(0.99, found.temperature)


def test_confidences_that_say_nothing_end_at_the_bounds() -> None:
    assert fit_temperature([0.9, 0.9], [0, 0]) == HOTTEST
    assert fit_temperature([0.9, 0.1], [1, 0]) == COLDEST
    with pytest.raises(UsageError, match="no confidences"):
        fit_temperature([], [])
    with pytest.raises(UsageError, match="two samples"):
        calibrate([0.5], [1])


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    made = calibrate([0.9, 0.8, 0.7, 0.2], [1, 0, 1, 0], model="m", data="d")
    made.write(file)
    assert Calibration.read(file) == made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperature": 0}, "above 0"),
        ({"temperature": "1"}, "numbers"),
        ({"measure": "median"}, "mean, minimum, joint"),
        ({"samples": None}, "numbers"),
        ({"slope": 1}, "JSON object with"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_by_name(tmp_path: Path, change: dict[str, object], says: str) -> None:
    file = tmp_path / "calibration.json"
    calibrate([0.9, 0.8], [1, 0]).write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError, match=says) as raised:
        Calibration.read(file)
    assert str(file) in str(raised.value)


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    for make in (lambda: None, lambda: (tmp_path / "c.json").write_text("{")):
        make()
        with pytest.raises(UsageError, match="cannot be read"):
            Calibration.read(tmp_path / "c.json")
