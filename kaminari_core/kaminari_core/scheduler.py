"""The built-in admission policies. A scheduler answers which waiting requests start now; the loop acts on the answer.

All three order requests alike (`Fair`): interactive before batch, first come first served within each, and batch is not starved
by a stream of interactive requests, because the oldest batch request goes first once `PATIENCE` seconds have passed since it
became the oldest. As this holds for each of them in turn, every request starts after finitely many others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kaminari_core.config import EngineConfig
from kaminari_core.protocols import Group, Later, Waiting

PATIENCE = 5.0
"""Seconds that the oldest batch request lets interactive ones pass."""
CHAT_GAP = 30.0
"""Seconds after an interactive request during which the next one is expected: a pause in a conversation."""


class Fair:
    """The order in which waiting requests start; remembers when the last batch request did."""

    def __init__(self) -> None:
        self._last_batch = float("-inf")

    def order(self, waiting: Iterable[Waiting], now: float) -> list[Waiting]:
        """Interactive requests, then batch requests, but an overdue batch request before all others."""
        interactive: list[Waiting] = []
        batch: list[Waiting] = []
        for request in waiting:
            (batch if request.priority == "batch" else interactive).append(request)
        overdue = batch[:1] if batch and self.overdue(batch[0], now) else []
        return [*overdue, *interactive, *batch[len(overdue) :]]

    def overdue(self, oldest_batch: Waiting, now: float) -> bool:
        """Whether the oldest batch request has let others pass for long enough."""
        return now - max(oldest_batch.since, self._last_batch) >= PATIENCE

    def note(self, admitted: Iterable[Waiting], now: float) -> None:
        """Record what was admitted."""
        if any(request.priority == "batch" for request in admitted):
            self._last_batch = now


class ContinuousScheduler:
    """Fills free slots at any step.

    A folder of pages alone gets every slot. While somebody chats (an interactive request started less than `CHAT_GAP` seconds
    ago), batch requests leave one slot free, so that the next message need not wait for a page to end; an overdue one may take
    it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._slots = config.slots
        self._fair = Fair()
        self._last_interactive = float("-inf")

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str]:
        """See Scheduler."""
        chosen: list[Waiting] = []
        for request in self._fair.order(waiting, now)[:free]:
            if request.priority == "interactive":
                self._last_interactive = now
            elif self._reserves(now) and free - len(chosen) <= 1 and not self._fair.overdue(request, now):
                break
            chosen.append(request)
            self._fair.note((request,), now)
        return [request.id for request in chosen]

    def _reserves(self, now: float) -> bool:
        return self._slots > 1 and now - self._last_interactive < CHAT_GAP


class MicrobatchScheduler:
    """Starts a group, decodes it as one batch, and admits nothing until all of it has ended.

    A group starts when it fills all slots, or `batch_window` seconds after its first request was ready.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._window = config.batch_window
        self._fair = Fair()

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str] | Group | Later:
        """See Scheduler."""
        if running:
            return ()
        closes = min(request.since for request in waiting) + self._window
        if len(waiting) < free and now < closes:
            return Later(closes)
        group = self._fair.order(waiting, now)[:free]
        self._fair.note(group, now)
        return Group([request.id for request in group])


class StreamingScheduler:
    """One request at a time, which then has the whole device: the least time between two tokens."""

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._fair = Fair()

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str]:
        """See Scheduler."""
        if running:
            return ()
        first = self._fair.order(waiting, now)[0]
        self._fair.note((first,), now)
        return [first.id]
