"""One reply growing token by token: text, stop strings, end tokens and the token limit, with nothing of the engine in it."""

from __future__ import annotations

from collections.abc import Container

from kaminari_core.flow import Alternative, FinishDetail, FinishReason, Token
from kaminari_core.protocols import Detokenizer
from kaminari_core.text import StopStrings

REASONS: dict[FinishDetail, FinishReason] = {
    "end_token": "stop",
    "stop_string": "stop",
    "structure_complete": "stop",
    "max_tokens": "length",
    "context_full": "length",
    "cancelled": "cancelled",
}


class Reply:
    """Collects the tokens of one reply.

    `limit` is how many tokens may be generated, and `at_limit` what to call reaching it. `finish` is None while the reply
    goes on. The end token is counted in `generated` but is no part of `tokens`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: tuple[str, ...],
        end_tokens: Container[int],
        limit: int,
        at_limit: FinishDetail,
    ) -> None:
        assert limit >= 1, "a reply that may hold no token must not be started"
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop)
        self._end_tokens = end_tokens
        self._limit, self._at_limit = limit, at_limit
        self._pieces: list[str] = []
        self.tokens: list[Token] = []
        self.generated = 0
        self.finish: FinishDetail | None = None

    @property
    def text(self) -> str:
        """All text that has been released so far."""
        return "".join(self._pieces)

    @property
    def ended(self) -> bool:
        """Whether the reply takes no more tokens."""
        return self.finish is not None

    @property
    def remaining(self) -> int:
        """How many more tokens may be generated."""
        return self._limit - self.generated

    def alternative(self, token: int, logprob: float) -> Alternative:
        """A token with its bytes, for log-probability reports."""
        data = self._detokenizer.token_bytes(token)
        return Alternative(token, logprob, data.decode("utf-8", "replace"), data)

    def take(
        self, token: int, logprob: float | None = None, top: tuple[Alternative, ...] = (), *, last: bool = False
    ) -> tuple[str, tuple[Token, ...]]:
        """Add one generated token; returns the text that is now certain and the token, or no token for an end token.

        `last` is whether the structure that the reply is held to is complete with it, so that nothing may follow.
        """
        assert not self.ended, "a finished reply takes no tokens"
        self.generated += 1
        if token in self._end_tokens:
            return self._close("end_token"), ()
        data = self._detokenizer.token_bytes(token)
        taken = Token(token, data.decode("utf-8", "replace"), data, logprob, top)
        self.tokens.append(taken)
        text = self._release(self._detokenizer.push(token))
        if last:
            text += self._close("structure_complete")
        elif self.generated >= self._limit:
            text += self._close(self._at_limit)
        return text, (taken,)

    def cancel(self) -> str:
        """End the reply where it stands; returns the text that was held back."""
        return self._close("cancelled")

    def _release(self, text: str) -> str:
        safe = self._stops.push(text)
        if self._stops.hit:
            self.finish = "stop_string"
        self._pieces.append(safe)
        return safe

    def _close(self, detail: FinishDetail) -> str:
        """Release what is held back; `detail` is why, unless a stop string ended the reply or is found in that."""
        if self.ended:
            return ""
        text = self._release(self._detokenizer.flush())
        held = self._stops.flush()
        self._pieces.append(held)
        self.finish = "stop_string" if self._stops.hit else detail
        return text + held
