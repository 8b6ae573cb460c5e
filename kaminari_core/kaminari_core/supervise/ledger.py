"""The parent's book of requests: where each one is, and what becomes of it when the child ends.

    held --dispatch--> sent -> preparing -> prepared -> started --> ended: told the caller
      ^                 |          |            |          |
      +-- never begun --+----------|------------+          |  the child ended:
          run alone, one by one <--+-- no token yet -------+
          ended with an error    <---- tokens were sent ---+

What was in the child's hands (preparing, started) may be what killed it. Those without a token are run again one by one, with
nothing else in the child, so that the one that kills it again is known; twice alone, and it is refused.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kaminari_core.errors import EngineRestartedError, KaminariError, PoisonError
from kaminari_core.flow import Delta, Event, Failed, Finished, Request, Result, Timings, Usage
from kaminari_core.serving import Sink
from kaminari_core.supervise.messages import Stage

DEATHS_ALONE = 2
"""A request that was alone in the child this many times when it ended is not tried again."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request that has not ended. `deadline` and `since` (of the stage) are time.monotonic(); `tokens` were sent on."""

    request: Request
    sink: Sink
    submitted: float
    deadline: float
    stage: Stage = "held"
    since: float = 0.0
    tokens: int = 0
    deaths_alone: int = 0
    cancelled: bool = False
    told: bool = False
    """The caller has had its last event; what the child still says of it is dropped."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the sink is called, so that nothing follows the last event."""


class Ledger:
    """All requests of one supervised engine. The caller holds the engine's lock, except for `tell`."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.suspects: deque[Entry] = deque()
        self.alone: Entry | None = None
        """The suspect that is in the child by itself."""
        self.finished: Counter[str] = Counter()

    def count(self, *stages: Stage) -> int:
        """How many requests are at these stages."""
        return sum(entry.stage in stages for entry in self.entries.values())

    @property
    def in_child(self) -> bool:
        """Whether the child has anything to do."""
        return any(entry.stage != "held" for entry in self.entries.values())

    @property
    def next_deadline(self) -> float:
        """The earliest deadline, infinity without one."""
        return min((entry.deadline for entry in self.entries.values() if not entry.told), default=math.inf)

    @property
    def longest_preparing(self) -> float:
        """For how many seconds the oldest one has been prepared."""
        begun = [entry.since for entry in self.entries.values() if entry.stage == "preparing"]
        return time.monotonic() - min(begun) if begun else 0.0

    def due(self) -> list[Entry]:
        """Entries whose deadline has passed and whose caller does not know yet."""
        now = time.monotonic()
        return [entry for entry in self.entries.values() if entry.deadline <= now and not entry.told]

    def move(self, request_id: str, stage: Stage) -> None:
        """Note a stage that the child reports."""
        if entry := self.entries.get(request_id):
            entry.stage, entry.since = stage, time.monotonic()

    def dispatch(self) -> Iterator[Entry]:
        """The entries to send to the child now: all that are held, or one suspect when there are any."""
        if self.alone is not None:
            return
        if self.suspects:
            if not self.in_child:
                self.alone = self.suspects.popleft()
                yield self._sent(self.alone)
            return
        for entry in list(self.entries.values()):
            if entry.stage == "held":
                yield self._sent(entry)

    def remove(self, entry: Entry) -> None:
        """Forget an entry that has ended."""
        self.entries.pop(entry.request.id, None)
        if self.alone is entry:
            self.alone = None
        if entry in self.suspects:
            self.suspects.remove(entry)

    def after_death(self, how: str) -> list[tuple[Entry, Event]]:
        """Put everything back to `held`, and return what ends now with its last event. `how` says how the child ended."""
        in_hand = [entry for entry in self.entries.values() if entry.stage in ("preparing", "started")]
        ends: list[tuple[Entry, Event]] = []
        suspects = []
        for entry in self.entries.values():
            if entry.told:
                ends.append((entry, Failed(entry.request.id, EngineRestartedError(how))))
            elif entry.cancelled:
                ends.append((entry, cancelled(entry)))
            elif error := _verdict(entry, in_hand, how):
                ends.append((entry, Failed(entry.request.id, error)))
            elif entry in in_hand:
                suspects.append(entry)
            entry.stage = "held"
        self.alone = None
        # A suspect that was killed by chance, as it waited for its turn, keeps its place.
        self.suspects.extendleft(reversed([entry for entry in suspects if entry not in self.suspects]))
        for entry, _ in ends:
            self.remove(entry)
        return ends

    def tell(self, entry: Entry, event: Event) -> None:
        """Pass an event to the caller, unless it has had its last one. What the sink raises goes to whoever calls this."""
        last = isinstance(event, Finished | Failed)
        with entry.lock:
            if entry.told:
                return
            entry.told = last
            if isinstance(event, Delta):
                entry.tokens += len(event.tokens)
            if last:
                # Before the caller knows, so that whoever it tells sees it counted.
                reason = event.result.finish_reason if isinstance(event, Finished) else "failed"
                self.finished[reason] += 1
            entry.sink(event)

    def _sent(self, entry: Entry) -> Entry:
        entry.stage, entry.since = "sent", time.monotonic()
        return entry


def _verdict(entry: Entry, in_hand: list[Entry], how: str) -> KaminariError | None:
    """The error that a request ends with when the child has ended, None when it may be run again."""
    if entry.tokens:
        return EngineRestartedError(
            f"the engine's process {how} when {entry.tokens} tokens of this reply had been sent; send the request again"
        )
    if in_hand == [entry]:
        entry.deaths_alone += 1
        if entry.deaths_alone >= DEATHS_ALONE:
            return PoisonError(
                f"the engine's process ended {entry.deaths_alone} times while it served request {entry.request.id} and no "
                f"other (the last time it {how}), so this request is not tried again"
            )
    return None


def cancelled(entry: Entry) -> Finished:
    """The end of a request that was cancelled while no engine had it."""
    waited = time.monotonic() - entry.submitted
    timings = Timings(0.0, waited, 0.0, 0.0, 0.0, 0.0, 0.0, waited, 0.0, 0.0, 0)
    usage = Usage(0, 0, entry.tokens)
    return Finished(
        entry.request.id, Result(entry.request.id, "", (), "cancelled", "cancelled", usage, timings, (), batch_size=0)
    )
