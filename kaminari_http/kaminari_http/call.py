"""The bridge from the engine's thread to the event loop.

A `Call` is the engine requests behind one HTTP request (one per choice). The engine calls each request's sink in its own
thread; the sink hands the event to the loop and returns, so the engine never waits for a client. Whoever holds a Call ends it
with `cancel`, which is harmless once everything has finished.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from kaminari_core.errors import EngineClosedError, KaminariError
from kaminari_core.flow import Delta, Event, Failed, Finished, Request, Result
from kaminari_core.serving import Serving
from kaminari_http.errors import ClientGoneError
from kaminari_http.metrics import Metrics

logger = logging.getLogger(__name__)
Reply = TypeVar("Reply")


class Call:
    """Engine requests that are served together, and their events in the order of arrival.

    Created by `submit`, in the event loop:

        call = Call.submit(engine, "qwen3vl", requests, metrics, "7f3a")
        try:
            async for index, event in call: ...     # Delta and Finished of requests[index]; a failure is raised
        finally:
            call.cancel()
    """

    def __init__(
        self, engine: Serving, model: str, requests: Sequence[Request], metrics: Metrics, http_id: str
    ) -> None:
        self.model = model
        self.requests = tuple(requests)
        self._engine = engine
        self._metrics = metrics
        self.http_id = http_id
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._first: tuple[int, Event] | None = None
        self._unfinished: set[int] = set()
        self._last_token: dict[int, float] = {}
        self._cancelled = False

    @classmethod
    def submit(cls, engine: Serving, model: str, requests: Sequence[Request], metrics: Metrics, http_id: str) -> Call:
        """Hand all requests to the engine, or none. Raises QueueFullError, EngineClosedError and RequestError.

        `http_id` is the id of the HTTP request, which the log lines of all its engine requests carry.
        """
        call = cls(engine, model, requests, metrics, http_id)
        for index, request in enumerate(call.requests):
            try:
                engine.submit(request, partial(call._sink, index))
            except KaminariError as error:
                call.cancel()
                metrics.observe_failure(model, error)
                raise
            call._unfinished.add(index)
        return call

    async def first(self, patience: float) -> None:
        """Wait up to `patience` seconds for the first event, so that an early failure can still choose the status.

        Raises the failure. The event stays the first one of the iteration.
        """
        try:
            self._first = await asyncio.wait_for(self._events.get(), patience)
        except TimeoutError:
            return
        _raise_failure(self._first[1])

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        running = len(self.requests)
        while running:
            index, event = self._first or await self._events.get()
            self._first = None
            _raise_failure(event)
            running -= isinstance(event, Finished)
            yield index, event

    async def results(self) -> list[Result]:
        """Wait for all results, in the order of the requests."""
        results: dict[int, Result] = {}
        async for index, event in self:
            if isinstance(event, Finished):
                results[index] = event.result
        return [results[index] for index in range(len(self.requests))]

    def cancel(self) -> None:
        """End what is still running, at most a step from now."""
        if self._cancelled:
            return
        self._cancelled = True
        for index in sorted(self._unfinished):
            engine_request = self.requests[index].id
            facts = {"request_id": self.http_id, "model": self.model, "engine_request": engine_request}
            logger.info("%s cancelling %s", self.http_id, engine_request, extra=facts)
            self._engine.cancel(self.requests[index].id)

    def _sink(self, index: int, event: Event) -> None:
        """Called in the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, index, event, time.monotonic())

    def _deliver(self, index: int, event: Event, at: float) -> None:
        match event:
            case Delta() if event.tokens:
                if (last := self._last_token.get(index)) is not None:
                    self._metrics.observe_gap(self.model, at - last, len(event.tokens))
                self._last_token[index] = at
            case Finished(result=result):
                usage = result.usage
                logger.info(
                    "%s %s %s: %s, %d prompt tokens, %d generated, %.3fs",
                    self.http_id, self.model, event.request_id, result.finish_detail,
                    usage.prompt_tokens, usage.completion_tokens, result.timings.total,
                    extra=self._facts(event) | {
                        "finish": result.finish_detail, "seconds": result.timings.total,
                        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
                    },
                )  # fmt: skip
                self._metrics.observe_result(self.model, event.result)
                self._unfinished.discard(index)
            case Failed():
                facts = self._facts(event) | {"finish": "failed"}
                logger.info("%s %s %s: %s", self.http_id, self.model, event.request_id, event.error, extra=facts)
                self._metrics.observe_failure(self.model, event.error)
                self._unfinished.discard(index)
        self._events.put_nowait((index, event))

    def _facts(self, event: Event) -> dict[str, Any]:
        return {"request_id": self.http_id, "model": self.model, "engine_request": event.request_id}


def _raise_failure(event: Event) -> None:
    if isinstance(event, Failed):
        raise event.error
    if isinstance(event, Finished) and event.result.finish_reason == "cancelled":
        # The client is still here, so it was the engine that gave up: half a reply must not pass for a whole one.
        raise EngineClosedError("The server is shutting down and ended this request before it was complete.")


async def unless_client_leaves(receive: Receive, waiting: Coroutine[Any, Any, Reply]) -> Reply:
    """Await `waiting`, but stop and raise ClientGoneError when the client closes its connection first.

    For replies without a stream and for streams that have not begun: only there does nothing else listen for the disconnect.
    """
    work = asyncio.create_task(waiting)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGoneError("The client left before the reply was complete.")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
