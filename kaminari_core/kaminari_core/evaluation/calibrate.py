"""Whether a model is as often right as it is sure: the confidences of lines against the truth of a set.

    lines of half of the pages -> a temperature -> reliability of the lines of the other half, before and after

A line is right when it stands, character by character, in the longest common subsequence of the lines that were read and of those
that are there. Every second page is for fitting, the others are for reporting, so no line is judged by what was learnt from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.extra import need
from kaminari_core.evaluation.reading import Outcome
from kaminari_core.evaluation.text_score import text_lines
from kaminari_core.evidence.calibration import (
    Bin,
    Calibration,
    Measure,
    expected_calibration_error,
    fit_temperature,
    negative_log_likelihood,
    reliability_bins,
    scale,
)
from kaminari_core.evidence.facts import LineConfidence

MEASURES: tuple[Measure, ...] = ("mean", "minimum", "joint")


@dataclass(frozen=True, slots=True)
class Line:
    """A line that was read: how sure the model was of it, and whether it is right."""

    page: str
    confidence: LineConfidence
    right: bool


@dataclass(frozen=True, slots=True)
class Reliability:
    """One measure of confidence on the lines for reporting, `lines` of them; the temperature was fitted on `fitted` others.

    `loss` is the mean negative log-likelihood, `error` the expected calibration error; each before and after scaling.
    """

    measure: Measure
    temperature: float
    fitted: int
    lines: int
    accuracy: float
    error: tuple[float, float]
    loss: tuple[float, float]
    bins: tuple[tuple[Bin, ...], tuple[Bin, ...]]

    def calibration(self, model: str, data: str) -> Calibration:
        """The file that serving reads."""
        return Calibration(
            measure=self.measure,
            temperature=self.temperature,
            samples=self.fitted,
            error_before=self.error[0],
            error_after=self.error[1],
            model=model,
            data=data,
        )


def judged_lines(outcome: Outcome) -> list[Line]:
    """The lines that were read on a page, judged; none of a page without a text to compare with."""
    if outcome.sample.text is None:
        return []
    read = [line.text.rstrip() for line in outcome.page.lines]
    common = need("rapidfuzz.distance").LCSseq.opcodes(read, text_lines(outcome.sample.text))
    right = {index for step in common if step.tag == "equal" for index in range(step.src_start, step.src_end)}
    return [Line(outcome.sample.name, line, index in right) for index, line in enumerate(outcome.page.lines)]


def calibrate(outcomes: Sequence[Outcome]) -> list[Reliability]:
    """The reliability of each measure. Raises UsageError when either half has no lines."""
    fitting = [line for outcome in outcomes[::2] for line in judged_lines(outcome)]
    reporting = [line for outcome in outcomes[1::2] for line in judged_lines(outcome)]
    if not fitting or not reporting:
        raise UsageError("a calibration needs lines in both halves of the set, but one half of the pages has none")
    return [_reliability(measure, fitting, reporting) for measure in MEASURES]


def best(found: Sequence[Reliability]) -> Reliability:
    """The measure whose scaled confidences tell right lines from wrong ones best: that of the least loss."""
    return min(found, key=lambda each: each.loss[1])


def table(found: Sequence[Reliability]) -> str:
    """All measures in a table, then the bins of the one with the least loss after scaling."""
    chosen = best(found)
    lines = [
        f"Fitted on {chosen.fitted} lines of every second page; {chosen.lines} of the others, {chosen.accuracy:.1%} right:",
        "",
        "| confidence of a line | temperature | ECE before | ECE after | loss before | loss after |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.measure} | {each.temperature:.2f} | {each.error[0]:.3f} | {each.error[1]:.3f} "
        f"| {each.loss[0]:.3f} | {each.loss[1]:.3f} |"
        for each in found
    ]
    head = f"| {chosen.measure} | lines before | confidence | right | lines after | confidence | right |"
    lines += ["", head, "| --- | --- | --- | --- | --- | --- | --- |"]
    for before, after in zip(*chosen.bins, strict=True):
        lines.append(f"| {before.lower:.1f} to {before.upper:.1f} | {_bin(before)} | {_bin(after)} |")
    return "\n".join(lines)


def as_json(found: Sequence[Reliability]) -> list[dict[str, Any]]:
    """Everything that is known of each measure."""
    return [asdict(each) for each in found]


def _reliability(measure: Measure, fitting: Sequence[Line], reporting: Sequence[Line]) -> Reliability:
    temperature = fit_temperature(*_claims(measure, fitting))
    claimed, right = _claims(measure, reporting)
    scaled = [scale(value, temperature) for value in claimed]
    return Reliability(
        measure=measure,
        temperature=temperature,
        fitted=len(fitting),
        lines=len(reporting),
        accuracy=sum(right) / len(right),
        error=(expected_calibration_error(claimed, right), expected_calibration_error(scaled, right)),
        loss=(negative_log_likelihood(claimed, right), negative_log_likelihood(scaled, right)),
        bins=(reliability_bins(claimed, right), reliability_bins(scaled, right)),
    )


def _claims(measure: Measure, lines: Sequence[Line]) -> tuple[list[float], list[float]]:
    return [float(getattr(line.confidence, measure)) for line in lines], [float(line.right) for line in lines]


def _bin(found: Bin) -> str:
    if found.confidence is None or found.accuracy is None:
        return "0 | - | -"
    return f"{found.count} | {found.confidence:.3f} | {found.accuracy:.3f}"
