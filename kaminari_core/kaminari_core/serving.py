"""What a front end may ask of an engine, wherever that runs: in this process (`engine.Engine`) or in a process of its own
(`supervise.SupervisedEngine`). Front ends are typed against `Serving` and work with both.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from kaminari_core.circuit import State as CircuitState
from kaminari_core.config import EngineConfig
from kaminari_core.flow import Event, Failed, Finished, Preview, Request, Result, Sampling
from kaminari_core.protocols import ModelShape
from kaminari_core.stats import Stats

Sink = Callable[[Event], None]
"""Takes the events of one request, in order, from another thread. It must not block."""


@dataclass(frozen=True, slots=True)
class Health:
    """What can be told about an engine without asking it to do anything.

    `state`: `serving`; `restarting` while a supervised engine has no process that is ready, when requests are taken and wait;
    `failed` when it will serve nothing any more; `closed`. `reason` says why it is not well. `working` is whether there is
    anything to do, `last_step` how many seconds ago a decode step last succeeded (None: never), `stalled` whether there is work
    and no step for `stall_seconds`. `circuit` is that of the decode step, see circuit.py. `restarts` counts those of a process.
    """

    state: Literal["serving", "restarting", "failed", "closed"]
    working: bool
    last_step: float | None
    stalled: bool
    circuit: CircuitState
    reason: str | None
    restarts: int = 0

    @property
    def ready(self) -> bool:
        """Whether requests sent now can be expected to be served."""
        return self.state == "serving" and not self.stalled and self.circuit != "open"


class Serving(Protocol):
    """An engine, from outside. All methods may be called from any thread."""

    name: str
    config: EngineConfig
    tasks: Mapping[str, str]

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        ...

    @property
    def sampling_defaults(self) -> Sampling:
        """What the checkpoint's own generation settings ask for."""
        ...

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; returns at once.

        The sink gets Delta events and then exactly one Finished or Failed, in order, from other threads; it must not block.
        Raises QueueFullError, EngineClosedError, EngineUnhealthyError, or RequestError for what can be told without preparing.
        """
        ...

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Submit a request and yield its events; leaving the iteration early cancels it."""
        ...

    def generate(self, request: Request) -> Result:
        """Submit a request and wait for its result. Raises the error of a request that failed."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request between two steps, as finished with the reason `cancelled`. Does nothing when it has ended."""
        ...

    def preview(self, request: Request) -> Preview:
        """Prepare a request as `submit` would, and drop it; takes as long as that. Raises what preparing raises."""
        ...

    def stats(self) -> Stats:
        """A snapshot of the counters."""
        ...

    def health(self) -> Health:
        """What can be told without asking the engine to do anything."""
        ...

    def probe(self, timeout: float = 10.0) -> float:
        """Have a decode step run now, unless they run anyway; returns the seconds it took to get the answer.

        Raises EngineError when no step succeeded within `timeout` seconds.
        """
        ...

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, let open ones finish for up to `drain` seconds, fail the rest and stop.

        From inside a sink, whose thread cannot wait for itself, it returns at once and the engine is closed behind it.
        """
        ...


class InSink(threading.local):
    """Whether the thread that asks is inside a sink of one engine; a context manager around each call of one."""

    inside = False

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *exception: object) -> None:
        self.inside = False


def closing_behind(calling: InSink, close: Callable[[float], None], drain: float) -> bool:
    """Whether the caller is inside a sink; if so, `close(drain)` runs in a thread of its own."""
    if calling.inside:
        threading.Thread(target=close, args=(drain,), name="close-engine").start()
    return calling.inside


def stream_events(engine: Serving, request: Request) -> Generator[Event, None, None]:
    """`Serving.stream` in terms of submit and cancel."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(request, events.put)
    try:
        while True:
            event = events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return
    finally:
        engine.cancel(request.id)


def wait_for_result(engine: Serving, request: Request) -> Result:
    """`Serving.generate` in terms of stream."""
    for event in engine.stream(request):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            return event.result
    raise AssertionError("a stream of events ended without its last event")
