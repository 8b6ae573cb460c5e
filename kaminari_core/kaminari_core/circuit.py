"""A circuit breaker: after repeated failures of the decode step, requests are refused at once instead of failing one by one.

closed      requests are taken; `AFTER` failed steps in a row open it
open        requests are refused with the reason, for a time that doubles with every failed trial
half-open   one request at a time is let through as a trial: a step that succeeds closes it, one that fails opens it again
"""

from __future__ import annotations

import time
from typing import Literal

from kaminari_core.errors import EngineUnhealthyError

State = Literal["closed", "open", "half-open"]


class Circuit:
    """The state of one engine's decode step. Written by the engine thread, read by all."""

    AFTER = 3
    FIRST, LONGEST = 1.0, 60.0
    """Seconds that it stays open, the first time and at most."""

    def __init__(self) -> None:
        self._failures = 0
        self._open_for = 0.0
        self._trial_at = 0.0
        self.reason: str | None = None

    @property
    def state(self) -> State:
        """Where it stands now."""
        if self.reason is None:
            return "closed"
        return "open" if time.monotonic() < self._trial_at else "half-open"

    def failed(self, reason: str) -> None:
        """Record a failed step."""
        self._failures += 1
        if self._failures < self.AFTER and self.reason is None:
            return
        self._open_for = min(2 * self._open_for or self.FIRST, self.LONGEST)
        self._trial_at = time.monotonic() + self._open_for
        self.reason = reason

    def succeeded(self) -> None:
        """Record a step that succeeded."""
        self._failures = 0
        self._open_for = 0.0
        self.reason = None

    def refusal(self, *, busy: bool = False) -> EngineUnhealthyError | None:
        """The error for a new request, None when it may pass; `busy` is whether another one is being served."""
        state, reason = self.state, self.reason
        if state == "closed" or (state == "half-open" and not busy):
            return None
        wait = max(0.0, self._trial_at - time.monotonic())
        then = f"it is tried again in {wait:.0f} s" if state == "open" else "it is being tried again now"
        return EngineUnhealthyError(f"the engine failed {self._failures} times in a row; {then}. Last: {reason}")
