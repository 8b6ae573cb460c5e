"""The engine: requests in, events out, one thread that owns the device.

Two threads meet in two places only. `submit` hands a request to a worker that prepares it (pictures, tokens) and queues it for
the engine thread; the sink carries events back, called from the engine thread, so a front end on an event loop passes
`lambda event: loop.call_soon_threadsafe(queue.put_nowait, event)`. The surface is small and its values pickle, so that the
whole engine can stand in another process behind the same methods.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from kaminari_core.config import EngineConfig
from kaminari_core.decode import DecodeCore
from kaminari_core.draft import Drafter, ModelDrafter, PromptLookup
from kaminari_core.errors import (
    EngineClosedError,
    EngineError,
    KaminariError,
    QueueFullError,
    RequestError,
    UsageError,
)
from kaminari_core.flow import Event, Failed, Finished, ImagePart, Request, Result
from kaminari_core.live import Live, Sink
from kaminari_core.loop import Loop
from kaminari_core.protocols import Cache, Model, Progress, Scheduler
from kaminari_core.sampling import validate
from kaminari_core.stats import Stats

logger = logging.getLogger(__name__)


class Engine:
    """Serves one model. Create, `start`, use from any thread, `close`; also a context manager that does both."""

    def __init__(
        self,
        name: str,
        model: Model,
        cache: Cache,
        scheduler: Scheduler,
        config: EngineConfig,
        *,
        tasks: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.model, self.config = name, model, config
        self.tasks = dict(tasks or {})
        widths = (1,) if config.draft == "none" else (1, config.draft_tokens + 1)
        self._core = DecodeCore(model, cache, compile=config.compile, widths=widths)
        self._loop = Loop(model, cache, scheduler, config, self._core, _drafter(config, self._core))
        self._workers = ThreadPoolExecutor(config.prepare_threads, thread_name_prefix=f"{name}-prepare")
        self._thread = threading.Thread(target=self._run, name=f"{name}-engine", daemon=True)
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._open: dict[str, Sink] = {}
        self._arrived: list[Live] = []
        self._leaving: list[str] = []
        self._doomed: set[str] = set()
        """Cancelled while they are still being prepared."""
        self._closing = False
        self._broken: KaminariError | None = None

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing and self._broken is None

    def warm_up(self, progress: Progress) -> None:
        """Compile every bucket of the decode step. Call before `start`; without it, a bucket compiles when first used."""
        assert not self._thread.is_alive(), "warm_up belongs before start: the engine thread owns the device"
        self._core.warm_up(progress)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; returns at once.

        The sink gets Delta events and then exactly one Finished or Failed, in order, from other threads; it must not block.
        Raises QueueFullError, EngineClosedError, or RequestError for what can be told without preparing.
        """
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}, but must be at least 1", param="max_tokens")
        validate(request.sampling, self.model.shape.vocabulary)
        if self.model.shape.image_unit is None:
            _refuse_pictures(request, self.name)
        with self._changed:
            self._check_open()
            if request.id in self._open:
                raise RequestError(f"a request with the id {request.id!r} is already being served", param="id")
            waiting = len(self._open) - self._loop.running
            if waiting >= self.config.queue:
                raise QueueFullError(f"{waiting} requests are waiting, which is the limit (--queue); try again later")
            self._open[request.id] = sink
            self._workers.submit(self._prepare, request, time.monotonic())

    def stream(self, request: Request) -> Iterator[Event]:
        """Submit a request and yield its events; leaving the iteration early cancels it."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(request, events.put)
        try:
            while True:
                event = events.get()
                yield event
                if isinstance(event, Finished | Failed):
                    return
        finally:
            self.cancel(request.id)

    def generate(self, request: Request) -> Result:
        """Submit a request and wait for its result. Raises the error of a request that failed."""
        for event in self.stream(request):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                return event.result
        raise AssertionError("a stream of events ended without its last event")

    def cancel(self, request_id: str) -> None:
        """End a request between two steps, as finished with the reason `cancelled`. Does nothing when it has ended."""
        with self._changed:
            if request_id in self._open:
                self._leaving.append(request_id)
                self._changed.notify_all()

    def stats(self) -> Stats:
        """A snapshot of the counters."""
        loop, core = self._loop, self._core
        running, waiting = loop.running, len(loop.waiting)
        return Stats(
            preparing=max(0, len(self._open) - running - waiting),
            waiting=waiting,
            running=running,
            slots=core.cache.slots,
            slots_busy=core.cache.slots - core.cache.free,
            steps=loop.steps,
            rows=loop.decoded_rows,
            prompt_tokens=loop.prompt_tokens,
            generated_tokens=loop.generated_tokens,
            compiles=core.compiles,
            finished=dict(loop.finished),
            drafts_proposed=loop.drafts_proposed,
            drafts_accepted=loop.drafts_accepted,
            drafts_paused=loop.drafting_paused,
        )

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, let open ones finish for up to `drain` seconds, fail the rest and stop the thread."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._open, timeout=drain)
            self._broken = self._broken or EngineClosedError(f"the engine {self.name!r} was closed")
            self._changed.notify_all()
        self._workers.shutdown(wait=True, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join()
        self._fail_open(self._broken)

    def _check_open(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closing or not self._thread.is_alive():
            raise EngineClosedError(f"the engine {self.name!r} is closed or was not started")

    def _prepare(self, request: Request, submitted: float) -> None:
        """In a worker: turn a request into a Live and queue it for the engine thread."""
        try:
            prepared = self.model.prepare(request)
            live = Live(
                prepared,
                lambda event: self._send(request.id, event),
                self.model.shape,
                self.model.detokenizer(),
                self.model.device,
                submitted=submitted,
                max_length=self.config.max_length,
                max_tokens=self.config.max_tokens,
            )
        except KaminariError as error:
            self._send(request.id, Failed(request.id, error))
        except Exception as error:
            logger.exception("preparing request %s failed", request.id)
            failure = EngineError(f"preparing the request failed: {type(error).__name__}: {error}")
            self._send(request.id, Failed(request.id, failure))
        else:
            with self._changed:
                self._arrived.append(live)
                self._changed.notify_all()

    def _send(self, request_id: str, event: Event) -> None:
        """Pass an event on, and forget the request with its last one."""
        sink = self._open.get(request_id)
        if sink is None:
            return
        if isinstance(event, Finished | Failed):
            with self._changed:
                self._open.pop(request_id, None)
                self._doomed.discard(request_id)
                self._changed.notify_all()
        try:
            sink(event)
        except Exception:
            logger.exception("the event sink of request %s failed; the request is cancelled", request_id)
            self.cancel(request_id)

    def _run(self) -> None:
        """The engine thread."""
        try:
            while self._collect():
                self._loop.step()
        except Exception as error:
            logger.exception("the engine thread of %r died", self.name)
            self._broken = EngineError(f"the engine {self.name!r} stopped: {type(error).__name__}: {error}")
        assert self._broken is not None, "the engine thread ends only when it is closed or broken"
        self._loop.fail_all(self._broken)
        self._fail_open(self._broken)

    def _collect(self) -> bool:
        """Wait for work and take in what other threads left; False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._leaving or self._broken or not self._loop.idle)
            arrived, self._arrived = self._arrived, []
            leaving, self._leaving = self._leaving, []
            leaving += [live.request.id for live in arrived if live.request.id in self._doomed]
        if self._broken is not None:
            return False
        for live in arrived:
            self._loop.add(live)
        for request_id in leaving:
            if not self._loop.cancel(request_id):
                with self._changed:
                    if request_id in self._open:
                        self._doomed.add(request_id)
        return True

    def _fail_open(self, error: KaminariError) -> None:
        for request_id in list(self._open):
            self._send(request_id, Failed(request_id, error))


def _refuse_pictures(request: Request, name: str) -> None:
    for message in request.messages:
        for part in message.parts:
            if isinstance(part, ImagePart):
                raise RequestError(
                    f"{part.name}: the model {name!r} takes no pictures; leave them out or serve a vision model",
                    param=part.name,
                    code="pictures_not_supported",
                )


def _drafter(config: EngineConfig, core: DecodeCore) -> Drafter | None:
    """What `--draft` names. Raises UsageError when the model has no draft head to use."""
    if config.draft == "none":
        return None
    if config.draft == "prompt-lookup":
        return PromptLookup()
    if core.cache.state is None:
        raise UsageError(
            "this model has no draft head (or the checkpoint lacks its weights); use --draft prompt-lookup"
        )
    return ModelDrafter(core, config.draft_tokens)
