"""One reply growing token by token: text, stop strings, end tokens, loops, the token limit, with nothing of the engine in it."""

from __future__ import annotations

from collections.abc import Container

from kaminari_core.evidence.facts import Repeat
from kaminari_core.evidence.loops import LoopGuard
from kaminari_core.flow import Alternative, FinishDetail, FinishReason, Token
from kaminari_core.protocols import Detokenizer
from kaminari_core.text import StopStrings

REASONS: dict[FinishDetail, FinishReason] = {
    "end_token": "stop",
    "stop_string": "stop",
    "structure_complete": "stop",
    "loop": "stop",
    "max_tokens": "length",
    "context_full": "length",
    "cancelled": "cancelled",
}
Released = tuple[str, tuple[Token, ...]]
"""Text and tokens that are certain now and have not been returned before."""


class Reply:
    """Collects the tokens of one reply.

    `limit` is how many tokens may be generated, and `at_limit` what to call reaching it. `finish` is None while the reply
    goes on. The end token is counted in `generated` but is no part of `tokens`. With a `guard`, what may turn out to be a loop is
    held back, and dropped if it does.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: tuple[str, ...],
        end_tokens: Container[int],
        limit: int,
        at_limit: FinishDetail,
        guard: LoopGuard | None = None,
    ) -> None:
        assert limit >= 1, "a reply that may hold no token must not be started"
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop)
        self._end_tokens = end_tokens
        self._limit, self._at_limit = limit, at_limit
        self._guard = guard
        self._marks: list[int] = []
        """With a guard: how many characters have been decoded behind each token."""
        self._decoded = 0
        self._pieces: list[str] = []
        self._certain = ""
        """Text in front of any stop string that has not been released."""
        self._released = self._released_tokens = 0
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

    @property
    def repeat(self) -> Repeat | None:
        """The loop that ended the reply."""
        return self._guard.found if self._guard is not None and self.finish == "loop" else None

    def alternative(self, token: int, logprob: float) -> Alternative:
        """A token with its bytes, for log-probability reports."""
        data = self._detokenizer.token_bytes(token)
        return Alternative(token, logprob, data.decode("utf-8", "replace"), data)

    def take(
        self, token: int, logprob: float | None = None, top: tuple[Alternative, ...] = (), *, last: bool = False
    ) -> Released:
        """Add one generated token; returns the text that is now certain and its tokens. An end token is none of them.

        `last` is whether the structure that the reply is held to is complete with it, so that nothing may follow.
        """
        assert not self.ended, "a finished reply takes no tokens"
        self.generated += 1
        if token in self._end_tokens:
            return self._close("end_token")
        data = self._detokenizer.token_bytes(token)
        self.tokens.append(Token(token, data.decode("utf-8", "replace"), data, logprob, top))
        text = self._detokenizer.push(token)
        self._push(text)
        held = 0
        if self._guard is not None and not (self._stops.hit or last):
            self._decoded += len(text)
            self._marks.append(self._decoded)
            held = self._guard.push(token, data)
            if self._guard.found is not None:
                self._cut(self._guard.found)
                return self._release()
        if last:
            return self._close("structure_complete")
        if self.generated >= self._limit:
            return self._close(self._at_limit)
        return self._release(held)

    def cancel(self) -> Released:
        """End the reply where it stands; returns what was held back."""
        return self._close("cancelled")

    def _push(self, text: str) -> None:
        self._certain += self._stops.push(text)
        if self._stops.hit:
            self.finish = "stop_string"

    def _release(self, held: int = 0) -> Released:
        """Let go of what is certain but for the last `held` tokens and their text."""
        text, first, last = self._certain, self._released_tokens, len(self.tokens) - held
        if held:
            text = text[: self._marks[last - 1] - self._released]
        self._certain = self._certain[len(text) :]
        self._pieces.append(text)
        self._released += len(text)
        self._released_tokens = last
        return text, tuple(self.tokens[first:last])

    def _cut(self, repeat: Repeat) -> None:
        """End with the first copy of a loop, unless a stop string that waited for a longer one comes first."""
        self._certain += self._stops.flush()
        end = self._marks[repeat.kept - 1]
        if self._stops.hit and self._released + len(self._certain) <= end:
            self.finish = "stop_string"
            return
        self._certain = self._certain[: end - self._released]
        del self.tokens[repeat.kept :]
        self.finish = "loop"

    def _close(self, detail: FinishDetail) -> Released:
        """Release what is held back; `detail` is why, unless a stop string ended the reply or is found in that."""
        if not self.ended:
            self._push(self._detokenizer.flush())
            self._certain += self._stops.flush()
            self.finish = "stop_string" if self._stops.hit else detail
        return self._release()
