"""How far one reply has got in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from torch import Tensor

from kaminari_core.errors import EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Constraint:
    """The state of one row. It moves on with `accept` alone; everything else looks ahead and comes back.

    After its creation it belongs to the engine thread.
    """

    def __init__(self, matcher: LLMatcher, end_tokens: Set[int]) -> None:
        self._matcher, self._end_tokens = matcher, end_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def is_satisfied(self) -> bool:
        """Whether the reply would be valid if it ended here."""
        return bool(self._matcher.is_accepting()) and not broken(self._matcher)

    def allowed(self, guess: Sequence[int]) -> int:
        """How many of the guessed tokens may come next, one after the other."""
        return int(self._matcher.validate_tokens(list(guess)))

    def mask(self, guess: Sequence[int], words: Tensor) -> None:
        """Write which tokens may come next, and behind each guessed token.

        `words` is int32 (more than the guesses, vocabulary // 32 + 1) in host memory and contiguous: bit t % 32 of word t // 32
        is set where token t may come. Rows behind an end of the reply are left as they are. The guesses must be `allowed`. Raises
        EngineError where the grammar has become too complex, or where no token of the vocabulary continues the reply.
        """
        advanced = 0
        for index in range(len(guess) + 1):
            row = words[index]
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.nbytes)
            if broken(self._matcher):
                raise self._failure()
            if index == len(guess) or guess[index] in self._end_tokens:
                break
            self._matcher.consume_token(guess[index])
            advanced += 1
            if self._matcher.is_stopped():
                break
        if advanced:
            self._matcher.rollback(advanced)

    def accept(self, token: int) -> None:
        """Take a token that became part of the reply. Raises EngineError for one that may not come next."""
        if not self._matcher.consume_token(token):
            raise self._failure()

    def _failure(self) -> EngineError:
        reason = self._matcher.get_error().partition("\n")[0] or "no token of the vocabulary may come next"
        return EngineError(f"the reply cannot be continued within its grammar: {reason}")


def broken(matcher: LLMatcher) -> bool:
    """Whether a matcher is of no more use: of an invalid grammar, out of its limits, or at a dead end.

    A broken one allows end tokens, and also calls itself stopped.
    """
    return bool(matcher.is_error()) or (bool(matcher.is_stopped()) and not matcher.is_accepting())
