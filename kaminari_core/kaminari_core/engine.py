"""The engine: requests in, events out, one thread that owns the device.

Two threads meet in two places only. `submit` hands a request to a worker that prepares it (pictures, tokens) and queues it for
the engine thread; the sink carries events back, called from the engine thread, so a front end on an event loop passes
`lambda event: loop.call_soon_threadsafe(queue.put_nowait, event)`. The surface is small and its values pickle, so that the
whole engine can stand in another process behind the same methods.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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
from kaminari_core.evidence.calibration import Calibration
from kaminari_core.evidence.loops import guard_for
from kaminari_core.flow import Event, Failed, Finished, Preview, Request, Result, Sampling
from kaminari_core.intake import check_request, deadline_error
from kaminari_core.live import Live
from kaminari_core.loop import Loop
from kaminari_core.protocols import Cache, Model, ModelShape, Progress, Scheduler
from kaminari_core.serving import Health, InSink, Sink, closing_behind, stream_events, wait_for_result
from kaminari_core.stats import Stats
from kaminari_core.structured.constraint import Constraint
from kaminari_core.structured.grammars import Grammars
from kaminari_core.threads import release_helpers
from kaminari_core.watch import Watch

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended. `deadline` is a time.monotonic(); `cancelled` is set while it is still being prepared."""

    request: Request
    sink: Sink
    submitted: float
    deadline: float
    cancelled: bool = False


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
        watch: Watch | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.name, self.model, self.config = name, model, config
        self.tasks: Mapping[str, str] = dict(tasks or {})
        self._calibration = calibration
        self._watch = watch or Watch()
        widths = (1,) if config.draft == "none" else (1, config.draft_tokens + 1)
        self._core = DecodeCore(model, cache, compile=config.compile, widths=widths)
        self._loop = Loop(model, cache, scheduler, config, self._core, _drafter(config, self._core), self._watch)
        self._grammars = Grammars(model)
        self._workers = ThreadPoolExecutor(config.prepare_threads, thread_name_prefix=f"{name}-prepare")
        self._thread = threading.Thread(target=self._run, name=f"{name}-engine", daemon=True)
        self._in_sink = InSink()
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._open: dict[str, _Open] = {}
        self._arrived: list[tuple[_Open, Live]] = []
        self._leaving: list[str] = []
        self._probes: list[Future[None]] = []
        self._finished: Counter[str] = Counter()
        self._next_deadline = math.inf
        self._step_began = math.inf
        self._closing = False
        self._broken: KaminariError | None = None

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def shape(self) -> ModelShape:
        """See Serving."""
        return self.model.shape

    @property
    def sampling_defaults(self) -> Sampling:
        """See Serving."""
        return self.model.sampling_defaults

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
        """See Serving."""
        check_request(request, self.model.shape, self.name)
        with self._changed:
            self._check_open()
            if refusal := self._loop.circuit.refusal(busy=bool(self._open)):
                raise refusal
            if request.id in self._open:
                raise RequestError(f"a request with the id {request.id!r} is already being served", param="id")
            waiting = len(self._open) - self._loop.running
            if waiting >= self.config.queue:
                raise QueueFullError(f"{waiting} requests are waiting, which is the limit (--queue); try again later")
            now = time.monotonic()
            deadline = math.inf if request.timeout is None else now + request.timeout
            opened = self._open[request.id] = _Open(request, sink, now, deadline)
            if deadline < self._next_deadline:
                self._next_deadline = deadline
                self._changed.notify_all()
            self._workers.submit(self._prepare, opened)

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """See Serving."""
        return stream_events(self, request)

    def generate(self, request: Request) -> Result:
        """See Serving."""
        return wait_for_result(self, request)

    def cancel(self, request_id: str) -> None:
        """See Serving."""
        with self._changed:
            if request_id in self._open:
                self._leaving.append(request_id)
                self._changed.notify_all()

    def preview(self, request: Request) -> Preview:
        """See Serving."""
        check_request(request, self.model.shape, self.name)
        self._constraint(request)
        prepared = self.model.prepare(request)
        return Preview(prepared.tokens, prepared.saw)

    def stats(self) -> Stats:
        """See Serving."""
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
            finished=dict(self._finished),
            drafts_proposed=loop.drafts_proposed,
            drafts_accepted=loop.drafts_accepted,
            drafts_paused=loop.drafting_paused,
            batches=loop.batches,
            circuit=loop.circuit.state,
            mask_copies=loop.masks.copies,
        )

    def health(self) -> Health:
        """See Serving."""
        now, loop = time.monotonic(), self._loop
        broken = self._broken
        return Health(
            state="serving" if self.alive else "closed" if isinstance(broken, EngineClosedError) else "failed",
            working=bool(self._open),
            last_step=None if loop.last_step is None else now - loop.last_step,
            stalled=now - self._step_began > self.config.stall_seconds,
            circuit=loop.circuit.state,
            reason=loop.circuit.reason if broken is None else str(broken),
        )

    def probe(self, timeout: float = 10.0) -> float:
        """See Serving."""
        began = time.monotonic()
        probe: Future[None] = Future()
        with self._changed:
            self._check_open()
            self._probes.append(probe)
            self._changed.notify_all()
        try:
            probe.result(timeout)
        except concurrent.futures.TimeoutError as error:
            raise EngineError(f"no decode step ended within {timeout:g} s") from error
        return time.monotonic() - began

    def close(self, drain: float = 0.0) -> None:
        """See Serving."""
        if closing_behind(self._in_sink, self.close, drain):
            return
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._open, timeout=min(drain, threading.TIMEOUT_MAX))
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

    def _prepare(self, opened: _Open) -> None:
        """In a worker: turn a request into a Live and queue it for the engine thread."""
        request = opened.request
        self._watch.preparing(request.id)
        try:
            constraint = self._constraint(request)
            live = Live(
                self.model.prepare(request),
                lambda event: self._send(opened, event),
                self.model.shape,
                self.model.detokenizer(),
                self.model.device,
                submitted=opened.submitted,
                max_length=self.config.max_length,
                max_tokens=self.config.max_tokens,
                constraint=constraint,
                guard=guard_for(request, self.config, self.tasks),
                calibration=self._calibration,
            )
        except KaminariError as error:
            self._send(opened, Failed(request.id, error))
        except Exception as error:
            logger.exception("preparing request %s failed", request.id)
            failure = EngineError(f"preparing the request failed: {type(error).__name__}: {error}")
            self._send(opened, Failed(request.id, failure))
        else:
            release_helpers()
            self._watch.prepared(request.id)
            with self._changed:
                # One whose deadline passed has ended, and its id may be in use again.
                if self._open.get(request.id) is opened:
                    self._arrived.append((opened, live))
                    self._changed.notify_all()

    def _constraint(self, request: Request) -> Constraint | None:
        return None if request.structure is None else self._grammars.constraint(request.structure)

    def _send(self, opened: _Open, event: Event) -> None:
        """Pass an event on, and forget the request with its last one."""
        request_id = opened.request.id
        with self._changed:
            if self._open.get(request_id) is not opened:
                return
            if isinstance(event, Finished | Failed):
                del self._open[request_id]
                self._finished[event.result.finish_reason if isinstance(event, Finished) else "failed"] += 1
                self._changed.notify_all()
        try:
            with self._in_sink:
                opened.sink(event)
        except Exception:
            logger.exception("the event sink of request %s failed; the request is cancelled", request_id)
            self.cancel(request_id)

    def _run(self) -> None:
        """The engine thread."""
        try:
            while self._collect():
                self._step_began = time.monotonic()
                self._watch.stepping()
                self._loop.step()
                self._answer_probes()
                self._watch.stepped()
                self._step_began = math.inf
        except Exception as error:
            logger.exception("the engine thread of %r died", self.name)
            self._broken = EngineError(f"the engine {self.name!r} stopped: {type(error).__name__}: {error}")
            self._watch.broken(self._broken)
        assert self._broken is not None, "the engine thread ends only when it is closed or broken"
        self._step_began = math.inf
        self._loop.fail_all(self._broken)
        self._fail_open(self._broken)

    def _collect(self) -> bool:
        """Wait for work and take in what other threads left; False when the thread is to end."""
        with self._changed:
            while (pause := self._pause()) > 0:
                self._watch.resting()
                release_helpers()
                self._changed.wait(pause)
            # One may have arrived and ended, by its deadline, since the last call.
            arrived = [each for each in self._arrived if self._open.get(each[0].request.id) is each[0]]
            self._arrived = []
            leaving, self._leaving = self._leaving, []
            leaving += [opened.request.id for opened, _ in arrived if opened.cancelled]
        if self._broken is not None:
            return False
        for _, live in arrived:
            self._loop.add(live)
        for request_id in leaving:
            if not self._loop.cancel(request_id):
                with self._changed:
                    if request_id in self._open:
                        self._open[request_id].cancelled = True
        if time.monotonic() >= self._next_deadline:
            self._expire()
        return True

    def _pause(self) -> float:
        """Seconds for which the engine thread has nothing to do, unless something changes."""
        if self._arrived or self._leaving or self._probes or self._broken:
            return 0.0
        until = min(self._loop.next_step, self._next_deadline)
        return min(until - time.monotonic(), threading.TIMEOUT_MAX) if until > 0 else 0.0

    def _expire(self) -> None:
        """Fail the requests whose deadline has passed, wherever they are."""
        now = time.monotonic()
        with self._changed:
            late = [opened for opened in self._open.values() if opened.deadline <= now]
            others = (opened.deadline for opened in self._open.values() if opened.deadline > now)
            self._next_deadline = min(others, default=math.inf)
        for opened in late:
            error = deadline_error(opened.request)
            if not self._loop.fail(opened.request.id, error):
                self._send(opened, Failed(opened.request.id, error))

    def _answer_probes(self) -> None:
        with self._changed:
            probes, self._probes = self._probes, []
        for probe in probes:
            try:
                self._loop.probe()
            except KaminariError as error:
                probe.set_exception(error)
            else:
                probe.set_result(None)

    def _fail_open(self, error: KaminariError) -> None:
        for opened in list(self._open.values()):
            self._send(opened, Failed(opened.request.id, error))
        with self._changed:
            probes, self._probes = self._probes, []
        for probe in probes:
            probe.set_exception(error)


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
