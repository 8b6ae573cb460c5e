"""What keeps a child running: it starts one, watches over it, and replaces it; in the meantime it keeps the requests.

A thread watches over the child. It acts when the child has ended, when it is silent for too long while it has work, and when a
deadline passes; otherwise it sleeps. Silence is judged later than the child's own watchdog fires, so that the stack of a hang
is in the log before the process is gone.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from kaminari_core.errors import EngineClosedError, EngineError, KaminariError
from kaminari_core.flow import Event, Failed, Finished
from kaminari_core.intake import deadline_error
from kaminari_core.progress import silent
from kaminari_core.protocols import Progress
from kaminari_core.serving import Health, InSink
from kaminari_core.stats import Stats
from kaminari_core.supervise.ledger import Entry, Ledger, cancelled
from kaminari_core.supervise.messages import (
    Answer,
    Cancel,
    LoadFailed,
    Logged,
    Progressed,
    Ready,
    Report,
    Setup,
    Submit,
)
from kaminari_core.supervise.process import ChildProcess

logger = logging.getLogger(__name__)

LOADING_SILENCE = 600.0
"""Seconds without a sign of life while the model loads."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to try again: after `first` seconds, twice as long after each further failure in a row, up to `longest`, all of it
    times a random number between a half and one. After `most_failures` in a row the engine gives up. A request that ends well
    ends the row.
    """

    first: float = 0.5
    longest: float = 30.0
    most_failures: int = 5

    def delay(self, failures: int) -> float:
        """Seconds before the next start after this many failures in a row."""
        return min(self.longest, self.first * 2.0 ** max(0, failures - 1)) * random.uniform(0.5, 1.0)


class Keeper:
    """One child at a time, and the ledger of its requests. `changed` guards every public attribute.

    `facts` are those of the first child, `counters` the last ones of this child and `before` those of its predecessors,
    `questions` those that are open, by number, with when they were asked, `reason` why there is no child that serves.
    """

    def __init__(self, setup: Setup, progress: Progress, policy: RestartPolicy) -> None:
        self.changed = threading.Condition()
        self.ledger = Ledger()
        self.facts: Ready | None = None
        self.counters: tuple[Stats, Health] | None = None
        self.before: list[Stats] = []
        self.counted_at = 0.0
        self.questions: dict[int, tuple[Future[Any], float]] = {}
        self.restarts = 0
        self.reason: str | None = None
        self.state: Literal["serving", "restarting", "failed", "closed"] = "restarting"
        self.stopping = False
        self.in_sink = InSink()
        self._setup, self._progress, self._policy = setup, progress, policy
        self._stall_seconds = setup.config.stall_seconds
        self._silence = 1.5 * self._stall_seconds + 1.0
        self._load_error: KaminariError | None = None
        self._failures = 0
        self.child = self._spawn()
        self._thread = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)
        atexit.register(self.abandon)

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._setup.name or self._setup.model

    def start(self) -> Ready:
        """Wait until the first child has loaded its model, and watch over it from then on. Raises what loading raises."""
        try:
            error = self._await_ready()
        except BaseException:
            self.abandon()
            raise
        if error is not None:
            self.abandon()
            raise error
        assert self.facts is not None
        # The bars of the first start have been put away when there is another.
        self._progress = silent
        self._thread.start()
        return self.facts

    def cancel(self, request_id: str) -> None:
        """End a request, here or in the child."""
        with self.changed:
            entry = self.ledger.entries.get(request_id)
            if entry is None:
                return
            entry.cancelled = True
            if entry.stage != "held":
                self.child.send(Cancel(request_id))
                return
            self.ledger.remove(entry)
            self.changed.notify_all()
        self.tell(entry, cancelled(entry))

    def stop(self) -> None:
        """End the thread; no child is started any more."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        self._thread.join()

    def _supervise(self) -> None:
        while True:
            reason = self._watch_over()
            if reason is None:
                return
            self.child.kill()
            if self.child.ended and reason == "ended":
                reason = self.child.describe_end()
            self._after_death(reason)
            if not self._restart():
                return

    def _watch_over(self) -> str | None:
        """Wait until the child is no more, or has to be ended; returns how that came, None when the engine closes."""
        while True:
            with self.changed:
                if self.stopping:
                    return None
                if self.child.ended:
                    return "ended"
                due = self.ledger.due()
                silent = self._silent_for()
                if not due and silent <= self._silence:
                    self.changed.wait(self._pause(silent))
                    continue
            for entry in due:
                self._expire(entry)
            if silent > self._silence and self._still_silent():
                self.child.kill(stacks=True)
                return f"made no step for {self._stall_seconds:g} s and was ended"

    def _pause(self, silent: float) -> float | None:
        """Seconds until a deadline passes or silence becomes too long, None when neither can happen."""
        until = self.ledger.next_deadline - time.monotonic()
        if self.ledger.in_child or self.questions:
            until = min(until, self._silence - silent + 0.01)
        return None if until == math.inf else max(0.0, until)

    def _silent_for(self) -> float:
        """Seconds without a sign of life from the child while it has work, or for which one thing takes if that is more."""
        now = time.monotonic()
        asked = now - min((at for _, at in self.questions.values()), default=now)
        if not self.ledger.in_child:
            return asked
        return max(now - self.child.heard, self.ledger.longest_preparing, asked)

    def _still_silent(self) -> bool:
        """Whether it is the child that is silent: when this process stood still, its messages wait to be read."""
        with self.changed:
            self.changed.wait_for(lambda: self._silent_for() <= self._silence, timeout=0.2)
            return self._silent_for() > self._silence

    def _expire(self, entry: Entry) -> None:
        self.tell(entry, Failed(entry.request.id, deadline_error(entry.request)))
        with self.changed:
            if entry.stage == "held":
                self.ledger.remove(entry)
            else:
                self.child.send(Cancel(entry.request.id))
            self.changed.notify_all()

    def _after_death(self, reason: str) -> None:
        logger.error("the process of engine %r %s", self.name, reason)
        with self.changed:
            self._failures += 1
            self.reason = f"the engine's process {reason}"
            if self.state == "serving":
                self.state = "restarting"
            if self.counters:
                self.before = [*self.before, self.counters[0]]
                self.counters = None
            ends = self.ledger.after_death(reason)
            if any(entry.deaths_alone for entry, _ in ends):
                self._failures = 1
            questions, self.questions = self.questions, {}
        for question, _ in questions.values():
            question.set_exception(EngineError(self.reason))
        for entry, event in ends:
            self.tell(entry, event)
        with self.changed:
            self.changed.notify_all()

    def _restart(self) -> bool:
        """Start children until one is ready; False when that is given up, or the engine closes."""
        while True:
            with self.changed:
                if self._failures > self._policy.most_failures:
                    break
                delay = self._policy.delay(self._failures)
                logger.info("the engine %r is started again in %.1f s", self.name, delay)
                until = time.monotonic() + delay
            if not self._wait_while_down(until):
                return False
            with self.changed:
                self.restarts += 1
                self.child = self._spawn()
            error = self._await_ready()
            if error is None:
                return True
            self.child.kill()
            if self.stopping:
                return False
            logger.error("the engine %r cannot be started again: %s", self.name, error)
            with self.changed:
                self._failures += 1
                self.reason = str(error)
        self._give_up()
        return False

    def _wait_while_down(self, until: float) -> bool:
        """Wait, with deadlines kept; False when the engine closes."""
        while True:
            with self.changed:
                if self.stopping:
                    return False
                now = time.monotonic()
                if now >= until:
                    return True
                due = self.ledger.due()
                if not due:
                    self.changed.wait(max(0.0, min(until, self.ledger.next_deadline) - now))
            for entry in due:
                self._expire(entry)

    def _give_up(self) -> None:
        with self.changed:
            if self.state == "restarting":
                self.state = "failed"
            times, reason = self._failures, self.reason
        logger.critical("the engine %r failed %d times in a row and is not started again: %s", self.name, times, reason)
        self.end_all(self.failure())

    def _await_ready(self) -> KaminariError | None:
        """Wait until the child has loaded its model; returns why it did not, None when it did."""
        child = self.child
        while True:
            with self.changed:
                if child.ready:
                    if self.state == "restarting":
                        self.state = "serving"
                    self.reason = None
                    child.heard = time.monotonic()
                    self.dispatch()
                    return None
                if self._load_error is not None:
                    error, self._load_error = self._load_error, None
                    return error
                if self.stopping:
                    return EngineClosedError("the engine was closed while it started")
                if time.monotonic() - child.heard > LOADING_SILENCE:
                    return EngineError(
                        f"the engine's process gave no sign of life for {LOADING_SILENCE:g} s as it loaded"
                    )
                ended, due = child.ended, self.ledger.due()
                if not ended and not due:
                    rest = LOADING_SILENCE - (time.monotonic() - child.heard) + 0.01
                    self.changed.wait(max(0.0, min(rest, self.ledger.next_deadline - time.monotonic())))
            if ended:
                child.join()
                return EngineError(
                    f"the engine's process {child.describe_end()} while it loaded the model; see the log"
                )
            for entry in due:
                self._expire(entry)

    def _spawn(self) -> ChildProcess:
        return ChildProcess(self._setup, self._receive, self._note_end)

    def _note_end(self, child: ChildProcess) -> None:
        with self.changed:
            self.changed.notify_all()

    def dispatch(self) -> None:
        """Send what may be sent. The caller holds the lock."""
        if not self.child.ready or self.child.ended:
            return
        for entry in self.ledger.dispatch():
            # Deadlines are kept here, over restarts.
            self.child.send(Submit(dataclasses.replace(entry.request, timeout=None)))

    def _receive(self, child: ChildProcess, message: Any) -> None:
        """In a child's reading thread."""
        match message:
            case Report():
                self._take(message)
            case Logged(record):
                logging.getLogger(record.name).handle(record)
            case Progressed(stage, done, total):
                self._progress(stage, done, total)
            case Answer():
                self._answer(message)
            case Ready():
                with self.changed:
                    self.facts, child.ready = message, True
                    self.changed.notify_all()
            case LoadFailed(error):
                with self.changed:
                    self._load_error = error
                    self.changed.notify_all()

    def _take(self, report: Report) -> None:
        told: list[tuple[Entry, Event]] = []
        with self.changed:
            for request_id, stage in report.stages:
                self.ledger.move(request_id, stage)
            for event in report.events:
                entry = self.ledger.entries.get(event.request_id)
                if entry is None:
                    continue
                told.append((entry, event))
                if isinstance(event, Finished | Failed):
                    self.ledger.remove(entry)
                    if isinstance(event, Finished):
                        self._failures = 0
            if report.facts is not None:
                self.counters, self.counted_at = report.facts, time.monotonic()
        for entry, event in told:
            self.tell(entry, event)
        if any(isinstance(event, Finished | Failed) for _, event in told):
            with self.changed:
                self.dispatch()
                self.changed.notify_all()

    def tell(self, entry: Entry, event: Event) -> None:
        try:
            with self.in_sink:
                self.ledger.tell(entry, event)
        except Exception:
            logger.exception("the event sink of request %s failed; the request is cancelled", entry.request.id)
            self.cancel(entry.request.id)

    def _answer(self, answer: Answer) -> None:
        with self.changed:
            asked = self.questions.pop(answer.number, None)
        if asked is not None and answer.error is not None:
            asked[0].set_exception(answer.error)
        elif asked is not None:
            asked[0].set_result(answer.value)

    def failure(self) -> EngineError:
        """The error of an engine that was given up."""
        return EngineError(
            f"the engine {self.name!r} failed {self._failures} times in a row and is not started again; restart the server. "
            f"Last: {self.reason}"
        )

    def end_all(self, error: KaminariError) -> None:
        with self.changed:
            entries = list(self.ledger.entries.values())
            for entry in entries:
                self.ledger.remove(entry)
            questions, self.questions = self.questions, {}
        for question, _ in questions.values():
            question.set_exception(error)
        for entry in entries:
            self.tell(entry, Failed(entry.request.id, error))

    def abandon(self) -> None:
        """End the child when nobody closes the engine, whose own child ignores the signals that would end it."""
        self.child.kill()
        atexit.unregister(self.abandon)
