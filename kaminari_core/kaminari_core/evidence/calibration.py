"""From what a model claims to what is true: reliability, and the one temperature that brings the two together.

    confidences and whether each was right -> reliability_bins, expected_calibration_error
                                           -> calibrate -> Calibration, a JSON file

A confidence is a number from 0 to 1 that a reply gives of a line or a field (see confidence.py); it is calibrated when of all
lines with 0.9, nine in ten are right. Temperature scaling divides the log-odds by one number (Guo et al. 2017, arXiv:1706.04599,
section 4.2, for two classes: right and wrong). It keeps the order of confidences, so nothing that was surer becomes less
sure, and it never moves one across 0.5.

Plain arithmetic on lists, for front ends and evaluation alike; a few thousand lines take milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kaminari_core.errors import UsageError

Measure = Literal["mean", "minimum", "joint"]
"""Which number of a line is meant: the mean or the least of its tokens' probabilities, or their product."""
FILE_NAME = "calibration.json"
"""A checkpoint directory may hold its calibration under this name."""
BINS = 10
COLDEST, HOTTEST = 0.01, 100.0
"""Temperatures are sought between these; a fit at either end says that confidences do not tell right from wrong."""
CERTAIN = 1e-9
"""How close to 0 or 1 a confidence is taken to be: the log-odds of 1 itself are infinite."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Confidences above `lower` and up to `upper` (0 is in the first bin): how many, their mean, and the share that was right.

    Both are None in a bin of nothing.
    """

    lower: float
    upper: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration file holds. `temperature` is for confidences of the kind `measure`.

    `samples` is how many lines or fields it was fitted on, `error_before` and `error_after` their expected calibration errors;
    `error_after` is that of samples which the temperature was not fitted on (see `calibrate`). `model` and `data` say of what.
    """

    measure: Measure
    temperature: float
    samples: int
    error_before: float
    error_after: float
    model: str = ""
    data: str = ""

    def apply(self, confidence: float) -> float:
        """A confidence of the kind `measure`, calibrated."""
        return scale(confidence, self.temperature)

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read a calibration file. Raises UsageError that names the file and what is wrong with it."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"the calibration {path} cannot be read: {error}") from error
        return _checked(values, path)


def calibration_of(checkpoint: Path, wanted: str) -> Calibration | None:
    """The calibration that a setting means: `none`, `auto` (the checkpoint's own, if it has one) or a file.

    Raises UsageError for a file that is missing or no calibration.
    """
    own = checkpoint / FILE_NAME
    if wanted == "none" or (wanted == "auto" and not own.is_file()):
        return None
    return Calibration.read(own if wanted == "auto" else Path(wanted))


def scale(confidence: float, temperature: float) -> float:
    """Divide the log-odds of a confidence by a temperature: below 1 sharpens, above 1 blunts, 0.5 stays what it is."""
    return _sigmoid(_log_odds(confidence) / temperature)


def reliability_bins(confidences: Sequence[float], correct: Sequence[float], bins: int = BINS) -> tuple[Bin, ...]:
    """Sort confidences into `bins` bins of equal width. `correct[i]` is whether number i was right, or the share that was."""
    _check(confidences, correct)
    members: list[list[int]] = [[] for _ in range(bins)]
    for index, confidence in enumerate(confidences):
        members[min(bins - 1, max(0, math.ceil(confidence * bins) - 1))].append(index)
    return tuple(
        Bin(
            number / bins,
            (number + 1) / bins,
            len(inside),
            sum(confidences[index] for index in inside) / len(inside) if inside else None,
            sum(correct[index] for index in inside) / len(inside) if inside else None,
        )
        for number, inside in enumerate(members)
    )


def expected_calibration_error(confidences: Sequence[float], correct: Sequence[float], bins: int = BINS) -> float:
    """The mean of |confidence - accuracy| over the bins, weighted by their counts (Naeini et al. 2015); 0 of nothing."""
    if not confidences:
        return 0.0
    gaps = [
        each.count * abs(each.confidence - each.accuracy)
        for each in reliability_bins(confidences, correct, bins)
        if each.confidence is not None and each.accuracy is not None
    ]
    return sum(gaps) / len(confidences)


def negative_log_likelihood(confidences: Sequence[float], correct: Sequence[float], temperature: float = 1.0) -> float:
    """The mean of -log of the probability that scaled confidences give to what was the case. Lower is better."""
    _check(confidences, correct)
    odds = [_log_odds(confidence) / temperature for confidence in confidences]
    # -log sigmoid(x) is softplus(-x), and -log(1 - sigmoid(x)) is softplus(x).
    losses = [right * _softplus(-x) + (1 - right) * _softplus(x) for x, right in zip(odds, correct, strict=True)]
    return sum(losses) / len(losses)


def fit_temperature(confidences: Sequence[float], correct: Sequence[float]) -> float:
    """The temperature between COLDEST and HOTTEST of the least negative log-likelihood.

    In b = 1 / temperature the likelihood is that of a logistic regression with one coefficient, so it is convex: the
    derivative mean((sigmoid(b x) - right) x), x the log-odds, rises, and its zero is found by bisection. Raises UsageError when
    there is nothing to fit.
    """
    if not confidences:
        raise UsageError("there are no confidences to fit a temperature to")
    _check(confidences, correct)
    odds = [_log_odds(confidence) for confidence in confidences]

    def slope(inverse: float) -> float:
        return sum((_sigmoid(inverse * x) - right) * x for x, right in zip(odds, correct, strict=True))

    low, high = 1 / HOTTEST, 1 / COLDEST
    if slope(low) >= 0:
        return HOTTEST
    if slope(high) <= 0:
        return COLDEST
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


def calibrate(
    confidences: Sequence[float],
    correct: Sequence[float],
    measure: Measure = "mean",
    *,
    bins: int = BINS,
    model: str = "",
    data: str = "",
) -> Calibration:
    """Fit a temperature to all samples, and say what it is worth on samples that it has not seen.

    For `error_after` each half of the samples (every second one) is scaled by the temperature of the other half. Raises
    UsageError for fewer than two samples.
    """
    if len(confidences) < 2:
        raise UsageError(f"a calibration needs two samples or more, but there are {len(confidences)}")
    scaled = list(confidences)
    for half in (0, 1):
        temperature = fit_temperature(confidences[1 - half :: 2], correct[1 - half :: 2])
        scaled[half::2] = [scale(confidence, temperature) for confidence in confidences[half::2]]
    return Calibration(
        measure=measure,
        temperature=fit_temperature(confidences, correct),
        samples=len(confidences),
        error_before=expected_calibration_error(confidences, correct, bins),
        error_after=expected_calibration_error(scaled, correct, bins),
        model=model,
        data=data,
    )


def _checked(values: object, path: Path) -> Calibration:
    fields = {field.name: field for field in dataclasses.fields(Calibration)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if not isinstance(values, dict) or not needed <= values.keys() <= fields.keys():
        raise UsageError(f"the calibration {path} must be a JSON object with {', '.join(sorted(needed))}")
    numbers = ("temperature", "samples", "error_before", "error_after")
    if any(isinstance(values[name], bool) or not isinstance(values[name], int | float) for name in numbers):
        raise UsageError(f"the calibration {path} must have numbers as {', '.join(numbers)}")
    if values["measure"] not in get_args(Measure) or not 0 < values["temperature"] < math.inf:
        raise UsageError(
            f"the calibration {path} must have a measure that is one of {', '.join(get_args(Measure))}, and a temperature above 0"
        )
    return Calibration(**values)


def _check(confidences: Sequence[float], correct: Sequence[float]) -> None:
    assert len(confidences) == len(correct), "every confidence needs to be right or wrong"
    assert all(0 <= value <= 1 for value in (*confidences, *correct)), "confidences and shares lie between 0 and 1"


def _log_odds(confidence: float) -> float:
    inside = min(1 - CERTAIN, max(CERTAIN, confidence))
    return math.log(inside) - math.log1p(-inside)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
