"""The engine that stays: the surface of `Engine`, with the real one in a child process that is replaced when it fails."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from kaminari_core.errors import EngineClosedError, EngineError, QueueFullError, RequestError
from kaminari_core.flow import Event, Preview, Request, Result, Sampling
from kaminari_core.intake import check_request
from kaminari_core.protocols import ModelShape, Progress
from kaminari_core.serving import Health, Sink, closing_behind, stream_events, wait_for_result
from kaminari_core.stats import Stats
from kaminari_core.supervise.keeper import Keeper, RestartPolicy
from kaminari_core.supervise.ledger import Entry
from kaminari_core.supervise.messages import Count, Probe, Setup, Stop

STOP_SECONDS = 5.0
"""How long a child may take to end when it is told to."""


class SupervisedEngine:
    """See Serving. Made by `launch.open_supervised`; the model is loaded when the constructor returns.

    Raises what loading raises, and EngineError when the child ends while it loads.
    """

    def __init__(self, setup: Setup, progress: Progress, policy: RestartPolicy | None = None) -> None:
        self._keeper = Keeper(setup, progress, policy or RestartPolicy())
        self._ending = threading.Lock()
        self._facts = self._keeper.start()
        self.name, self.config, self.tasks = self._facts.name, self._facts.config, self._facts.tasks

    def __enter__(self) -> SupervisedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def shape(self) -> ModelShape:
        """See Serving."""
        return self._facts.shape

    @property
    def sampling_defaults(self) -> Sampling:
        """See Serving."""
        return self._facts.sampling_defaults

    @property
    def alive(self) -> bool:
        """See Serving. While the child is replaced, requests are taken and wait."""
        return self._keeper.state in ("serving", "restarting")

    @property
    def process_id(self) -> int | None:
        """The child's, None while there is none that serves."""
        return self._keeper.child.process.pid if self._keeper.state == "serving" else None

    def submit(self, request: Request, sink: Sink) -> None:
        """See Serving."""
        check_request(request, self.shape, self.name)
        with self._keeper.changed:
            self._check_open()
            ledger = self._keeper.ledger
            if request.id in ledger.entries:
                raise RequestError(f"a request with the id {request.id!r} is already being served", param="id")
            waiting = len(ledger.entries) - ledger.count("started")
            if waiting >= self.config.queue:
                raise QueueFullError(f"{waiting} requests are waiting, which is the limit (--queue); try again later")
            now = time.monotonic()
            deadline = math.inf if request.timeout is None else now + request.timeout
            if not ledger.in_child:
                self._keeper.child.heard = now
            ledger.entries[request.id] = Entry(request, sink, now, deadline)
            self._keeper.dispatch()
            if deadline < math.inf or len(ledger.entries) == 1:
                self._keeper.changed.notify_all()

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """See Serving."""
        return stream_events(self, request)

    def generate(self, request: Request) -> Result:
        """See Serving."""
        return wait_for_result(self, request)

    def cancel(self, request_id: str) -> None:
        """See Serving."""
        self._keeper.cancel(request_id)

    def stats(self) -> Stats:
        """See Serving. Counters go on over restarts."""
        keeper, ledger = self._keeper, self._keeper.ledger
        with keeper.changed:
            running = ledger.count("started")
            slots = self.config.slots
            latest = self._keeper.counters[0] if self._keeper.counters else None
            return _total(
                [*self._keeper.before, *([latest] if latest else [])],
                preparing=ledger.count("sent", "preparing"),
                waiting=ledger.count("held", "prepared"),
                running=running,
                slots=slots,
                slots_busy=min(running, slots),
                finished=dict(ledger.finished),
                drafts_paused=latest.drafts_paused if latest else (),
                circuit=latest.circuit if latest else "closed",
                restarts=self._keeper.restarts,
            )

    def health(self) -> Health:
        """See Serving."""
        with self._keeper.changed:
            now = time.monotonic()
            theirs = self._keeper.counters[1] if self._keeper.counters else None
            last_step = None
            if theirs is not None and theirs.last_step is not None:
                last_step = theirs.last_step + now - self._keeper.counted_at
            silent = now - self._keeper.child.heard
            return Health(
                state=self._keeper.state,
                working=bool(self._keeper.ledger.entries),
                last_step=last_step,
                stalled=self._keeper.ledger.in_child and silent > self.config.stall_seconds,
                circuit=theirs.circuit if theirs else "closed",
                reason=self._keeper.reason or (theirs.reason if theirs else None),
                restarts=self._keeper.restarts,
            )

    def preview(self, request: Request) -> Preview:
        """See Serving."""
        check_request(request, self.shape, self.name)
        preview: Preview = self._ask(lambda number: Count(number, request)).result()
        return preview

    def probe(self, timeout: float = 10.0) -> float:
        """See Serving."""
        began = time.monotonic()
        answer = self._ask(lambda number: Probe(number, timeout))
        try:
            # Its own answer says more than ours, so it gets a little longer.
            answer.result(timeout + 1.0)
        except FutureTimeoutError as error:
            raise EngineError(f"the engine's process did not answer within {timeout:g} s") from error
        return time.monotonic() - began

    def close(self, drain: float = 0.0) -> None:
        """See Serving."""
        keeper = self._keeper
        if closing_behind(keeper.in_sink, self.close, drain):
            return
        with keeper.changed:
            failed = keeper.state == "failed"
            keeper.state = "closed"
            if not failed:
                keeper.changed.wait_for(lambda: not keeper.ledger.entries, timeout=min(drain, threading.TIMEOUT_MAX))
        # Not around the wait: one that does not wait must get past one that does.
        with self._ending:
            keeper.stop()
            keeper.end_all(EngineClosedError(f"the engine {self.name!r} was closed"))
            keeper.child.send(Stop())
            if not keeper.child.join(STOP_SECONDS):
                keeper.child.kill()
            atexit.unregister(keeper.abandon)

    def _ask(self, question: Callable[[int], Any]) -> Future[Any]:
        """Send a question under a number of its own; the answer comes, or an error when the child ends first."""
        answer: Future[Any] = Future()
        keeper = self._keeper
        with keeper.changed:
            self._check_open()
            if keeper.state != "serving":
                raise EngineError(f"the engine is being restarted: {keeper.reason}")
            number = max(keeper.questions, default=0) + 1
            keeper.questions[number] = answer, time.monotonic()
            keeper.child.send(question(number))
            keeper.changed.notify_all()
        return answer

    def _check_open(self) -> None:
        if self._keeper.state == "failed":
            raise self._keeper.failure()
        if self._keeper.state == "closed":
            raise EngineClosedError(f"the engine {self.name!r} is closed")


def _total(parts: list[Stats], **current: Any) -> Stats:
    """Counters added up; what is not a counter is given, or as in the last part."""
    counters = (
        "steps",
        "rows",
        "prompt_tokens",
        "generated_tokens",
        "compiles",
        "batches",
        "drafts_proposed",
        "drafts_accepted",
    )
    nothing = {"preparing": 0, "waiting": 0, "running": 0, "slots": 0, "slots_busy": 0, "finished": {}}
    sums = {name: sum(getattr(part, name) for part in parts) for name in counters}
    return Stats(**{**nothing, **sums, **current})
