"""Comparing two runs of one conversation, fairly: two tokens whose logits tie may swap, and nothing after that is comparable.

A reply is compared up to the first step at which the tokens differ, that step included: until there both runs were fed the same.
If the logits of that step agree within the tolerance, the step was a tie within twice the tolerance, and no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kaminari_core.flow import Result
from kaminari_core.protocols import ReferenceRun


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference between logits, at the first step and after it, over `steps` comparable steps."""

    prefill: float
    decode: float
    steps: int

    @property
    def worst(self) -> float:
        """Over all steps."""
        return max(self.prefill, self.decode)


def difference(ours: ReferenceRun, theirs: ReferenceRun) -> Difference:
    """How far two runs are apart, as long as they say the same."""
    assert ours.logits is not None and theirs.logits is not None, "both runs must have kept their logits"
    pairs = list(zip(ours.tokens, theirs.tokens, strict=True))
    steps = next((step + 1 for step, (one, other) in enumerate(pairs) if one != other), len(pairs))
    apart = (ours.logits[:steps] - theirs.logits[:steps].to(ours.logits.device)).abs().amax(dim=-1)
    # Not a number compares as false with every tolerance, so it must not get lost in a maximum.
    apart = apart.nan_to_num(nan=float("inf"))
    return Difference(float(apart[0]), float(apart[1:].max()) if steps > 1 else 0.0, steps)


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies of two engines to the same requests: tokens compared, and the first real difference, None when there is none."""

    tokens: int
    wrong: str | None


def same_replies(names: Sequence[str], ours: Sequence[Result], theirs: Sequence[Result], tolerance: float) -> Replies:
    """Compare replies whose requests asked for two log-probabilities a token."""
    compared = 0
    for name, one, other in zip(names, ours, theirs, strict=True):
        step = next(
            (step for step, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if pair[0].id != pair[1].id),
            None,
        )
        compared += len(other.tokens) if step is None else step
        if step is None:
            if len(one.tokens) != len(other.tokens):
                return Replies(compared, f"{name}: {len(one.tokens)} tokens instead of {len(other.tokens)}")
            continue
        best, second = other.tokens[step].top[:2]
        if best.logprob - second.logprob > 2 * tolerance:
            said, wanted = one.tokens[step].id, other.tokens[step].id
            return Replies(compared, f"{name}: token {said} instead of {wanted} at step {step}")
    return Replies(compared, None)
