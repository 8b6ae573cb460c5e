"""How sure a model was of what it read: the probabilities of a reply's tokens, by line and by JSON field.

    tokens with log-probabilities + text -> which characters each token wrote -> Confidence

Probabilities are those of the chosen tokens under the model's unmodified logits. A line's tokens are all that wrote a part of it,
the line break that ends it included, for ending a line is a part of reading it. A token that wrote parts of two lines counts for
both.
"""

from __future__ import annotations

import codecs
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kaminari_core.errors import RequestError
from kaminari_core.evidence.calibration import Calibration
from kaminari_core.evidence.facts import Confidence, FieldConfidence, LineConfidence
from kaminari_core.evidence.json_values import leaves
from kaminari_core.flow import Result, Token


def confidence_of(text: str, tokens: Sequence[Token], calibration: Calibration | None = None) -> Confidence:
    """The confidence of a reply, from its text and its tokens with their log-probabilities."""
    spans = TokenSpans(tokens)
    lines, start = [], 0
    for index, line in enumerate(text.split("\n")):
        stop = start + len(line)
        if line.strip() and (found := spans.measure(start, min(stop + 1, len(text)), calibration)):
            lines.append(LineConfidence(index, line, found.mean, found.minimum, found.joint, found.calibrated))
        start = stop + 1
    fields = [
        FieldConfidence(leaf.path, leaf.value, found.mean, found.minimum, found.joint, found.calibrated)
        for leaf in leaves(text)
        if (found := spans.measure(leaf.start, leaf.stop, calibration))
    ]
    return Confidence(tuple(lines), tuple(fields))


def lines_with_confidence(result: Result) -> tuple[LineConfidence, ...]:
    """The lines of a result with how sure the model was of each. Raises RequestError when the request did not ask for it."""
    if result.confidence is None:
        raise RequestError("the request did not ask for confidence, so none was computed", param="confidence")
    return result.confidence.lines


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean, the minimum and the product of some tokens' probabilities, and the one that is calibrated."""

    mean: float
    minimum: float
    joint: float
    calibrated: float | None


class TokenSpans:
    """Which characters of the decoded text each token wrote: from `starts[i]` to before `stops[i]`, both rising with i.

    A character whose bytes are spread over several tokens is a part of each of them.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.starts: list[int] = []
        self.stops: list[int] = []
        self._logprobs: list[float] = []
        length = 0
        for token in tokens:
            assert token.logprob is not None, "confidence needs the log-probability of every token"
            if not token.bytes:
                continue
            self.starts.append(length)
            length += len(decoder.decode(token.bytes))
            self.stops.append(length + bool(decoder.getstate()[0]))
            self._logprobs.append(token.logprob)

    def measure(self, start: int, stop: int, calibration: Calibration | None) -> Measured | None:
        """Of all tokens that wrote a part of the characters from `start` to before `stop`; None where there is none."""
        logprobs = self._logprobs[bisect_right(self.stops, start) : bisect_left(self.starts, stop)]
        if not logprobs:
            return None
        mean = sum(map(math.exp, logprobs)) / len(logprobs)
        minimum, joint = math.exp(min(logprobs)), math.exp(math.fsum(logprobs))
        claimed = {"mean": mean, "minimum": minimum, "joint": joint}
        calibrated = None if calibration is None else calibration.apply(claimed[calibration.measure])
        return Measured(mean, minimum, joint, calibrated)
