"""The child's side: an engine that takes its requests from a pipe and reports through another.

Around its steps it arms `faulthandler`'s watchdog, which is a thread in C: where a step hangs while it holds the interpreter's
lock, no Python thread would ever run to notice. The watchdog writes all stacks to stderr and ends the process. Arming costs a
thread, so it is renewed after a quarter of the time only, and fires between one and one and a quarter `stall_seconds`.
"""

from __future__ import annotations

import faulthandler
import logging
import logging.handlers
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import EntryPoint
from multiprocessing.connection import Connection
from typing import Any

from kaminari_core.engine import Engine
from kaminari_core.errors import EngineError, KaminariError
from kaminari_core.flow import Event, Failed
from kaminari_core.supervise.messages import (
    Answer,
    Cancel,
    Count,
    LoadFailed,
    Logged,
    Probe,
    Progressed,
    Ready,
    Report,
    Setup,
    Stage,
    Stop,
    Submit,
)
from kaminari_core.watch import Watch

logger = logging.getLogger(__name__)

STACKS_SIGNAL = signal.SIGUSR1
"""Makes the child write the stacks of all its threads to stderr, whatever it is doing."""
FACTS_SECONDS = 0.1
"""Counters are sent no more often than this while steps run."""
BROKEN = 70
"""Exit code of a child whose engine thread died (EX_SOFTWARE of sysexits.h)."""


class Reporter(Watch):
    """Tells the parent what the engine does. What may end this process is told before: `preparing` and `starting` go at once."""

    def __init__(self, pipe: Connection, stall_seconds: float) -> None:
        self.engine: Engine | None = None
        self._pipe, self._stall_seconds = pipe, stall_seconds
        self._lock = threading.Lock()
        self._stages: list[tuple[str, Stage]] = []
        self._events: list[Event] = []
        self._facts_at = 0.0
        self._sent_at = 0.0
        self._stepping_thread = 0
        self._armed_at: float | None = None

    def sink(self, event: Event) -> None:
        """Take an event. Those of a step go out together when it ends."""
        if isinstance(event, Failed):
            event = Failed(event.request_id, picklable(event.error))
        with self._lock:
            self._events.append(event)
        if threading.get_ident() != self._stepping_thread:
            self._flush()

    def preparing(self, request_id: str) -> None:
        """See Watch."""
        self._note((request_id,), "preparing")
        self._flush()

    def prepared(self, request_id: str) -> None:
        """See Watch."""
        self._note((request_id,), "prepared")

    def starting(self, request_ids: Sequence[str]) -> None:
        """See Watch."""
        self._note(request_ids, "started")
        self._flush()

    def stepping(self) -> None:
        """See Watch."""
        self._stepping_thread = threading.get_ident()
        now = time.monotonic()
        if self._armed_at is None or now - self._armed_at > self._stall_seconds / 4:
            faulthandler.dump_traceback_later(1.25 * self._stall_seconds, exit=True)
            self._armed_at = now

    def stepped(self) -> None:
        """See Watch."""
        now = time.monotonic()
        self._flush(facts=now - self._facts_at > FACTS_SECONDS)

    def resting(self) -> None:
        """See Watch."""
        if self._armed_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_at = None
        self._flush(facts=self._facts_at < self._sent_at or bool(self._events))

    def broken(self, error: KaminariError) -> None:
        """See Watch. Nothing is failed here: the parent knows better what can be done for each request."""
        self._flush()
        os._exit(BROKEN)

    def send(self, message: Any) -> None:
        """Send a message. A parent that is gone ends this process."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._lock:
                self._pipe.send_bytes(data)
        except OSError:
            os._exit(0)

    def _note(self, request_ids: Sequence[str], stage: Stage) -> None:
        with self._lock:
            self._stages += [(request_id, stage) for request_id in request_ids]

    def _flush(self, *, facts: bool = False) -> None:
        engine = self.engine
        known = (engine.stats(), engine.health()) if facts and engine is not None else None
        with self._lock:
            if not (self._stages or self._events or known):
                return
            report = Report(tuple(self._stages), tuple(self._events), known)
            self._stages, self._events = [], []
            # Dumped and sent under the lock, so that reports leave in the order in which they were made.
            data = pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
            self._sent_at = time.monotonic()
            if known:
                self._facts_at = self._sent_at
            try:
                self._pipe.send_bytes(data)
            except OSError:
                os._exit(0)


class _Forward(logging.handlers.QueueHandler):
    """Log records go to the parent, which formats and filters all of them alike."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._reporter = reporter

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record that `prepare` has made picklable."""
        self._reporter.send(Logged(record))


def main(commands: Connection, reports: Connection, setup: Setup) -> None:
    """Open the engine and serve until told to stop, or until the parent is gone."""
    # The terminal's Ctrl-C and a service manager's SIGTERM reach every process; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    reporter = Reporter(reports, setup.config.stall_seconds)
    root = logging.getLogger()
    root.handlers = [_Forward(reporter)]
    root.setLevel(setup.log_level)
    try:
        engine = _open(setup, reporter)
    except KaminariError as error:
        reporter.send(LoadFailed(picklable(error)))
        return
    except Exception as error:
        logger.exception("the engine cannot be opened")
        reporter.send(LoadFailed(EngineError(f"the engine cannot be opened: {type(error).__name__}: {error}")))
        return
    reporter.engine = engine
    reporter.send(Ready(engine.name, engine.config, engine.tasks, engine.shape, engine.sampling_defaults))
    with ThreadPoolExecutor(setup.config.prepare_threads, thread_name_prefix="answer") as asked:
        _obey(commands, engine, reporter, asked)


def _open(setup: Setup, reporter: Reporter) -> Engine:
    import torch

    from kaminari_core.launch import open_engine
    from kaminari_core.registry import GROUP, load_registry

    torch.set_num_threads(setup.threads)
    registry = load_registry([EntryPoint(name, target, GROUP) for name, target in setup.plugins])

    def progress(stage: str, done: int, total: int) -> None:
        reporter.send(Progressed(stage, done, total))

    return open_engine(
        registry,
        setup.model,
        setup.checkpoint,
        setup.config,
        progress,
        setup.name,
        warm_up=setup.warm_up,
        watch=reporter,
    )


def _obey(commands: Connection, engine: Engine, reporter: Reporter, asked: ThreadPoolExecutor) -> None:
    while True:
        try:
            command = commands.recv()
        except (EOFError, OSError):
            os._exit(0)
        match command:
            case Submit(request):
                try:
                    engine.submit(request, reporter.sink)
                except KaminariError as error:
                    reporter.sink(Failed(request.id, error))
            case Cancel(request_id):
                engine.cancel(request_id)
            case Probe(number, timeout):
                asked.submit(_answer, reporter, number, partial(engine.probe, timeout))
            case Count(number, request):
                asked.submit(_answer, reporter, number, partial(engine.preview, request))
            case Stop():
                engine.close()
                return


def _answer(reporter: Reporter, number: int, work: Callable[[], Any]) -> None:
    try:
        reporter.send(Answer(number, work()))
    except KaminariError as error:
        reporter.send(Answer(number, error=picklable(error)))
    except Exception as error:
        logger.exception("a question cannot be answered")
        reporter.send(Answer(number, error=EngineError(f"{type(error).__name__}: {error}")))


def picklable(error: KaminariError) -> KaminariError:
    """The error itself, or what it says where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error
