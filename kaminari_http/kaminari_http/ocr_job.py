"""The pages of one `/v1/ocr` request on their way through an engine, as many at a time as it has slots.

A job is to its pages what a `Call` is to the choices of a chat: whoever holds it ends it with `cancel`, and its iteration gives
the results in the order in which they are done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from starlette.concurrency import run_in_threadpool

from kaminari_core.documents.document import Document
from kaminari_core.documents.pages import PageReader, PageResult, Ready, fail
from kaminari_core.errors import EngineClosedError, EngineUnhealthyError, KaminariError, QueueFullError
from kaminari_core.serving import Serving
from kaminari_http.call import Call
from kaminari_http.metrics import Metrics

FOR_ALL = (EngineClosedError, EngineUnhealthyError)
"""Errors that say nothing of a page: the whole request ends with them."""


class OcrJob:
    """Reads pages `numbers` of a document. Create in the event loop, where it starts at once."""

    def __init__(
        self,
        engine: Serving,
        model: str,
        reader: PageReader,
        document: Document,
        numbers: Sequence[int],
        metrics: Metrics,
        http_id: str,
    ) -> None:
        self.http_id = http_id
        self._engine, self._model, self._reader, self._document = engine, model, reader, document
        self._metrics = metrics
        self._numbers = iter(numbers)
        self._wanted = len(numbers)
        self._accepted = False
        self._first: PageResult | Exception | None = None
        self._results: asyncio.Queue[PageResult | Exception] = asyncio.Queue()
        workers = min(engine.config.slots, len(numbers))
        self._tasks = [asyncio.create_task(self._work()) for _ in range(workers)]

    async def first(self, patience: float) -> None:
        """Wait up to `patience` seconds for the first page, so that an early failure can still choose the status.

        Raises the failure of the request, or that of its only page.
        """
        try:
            self._first = await asyncio.wait_for(self._results.get(), patience)
        except TimeoutError:
            return
        if isinstance(self._first, Exception):
            raise self._first
        if self._wanted == 1 and self._first.error is not None:
            raise self._first.error

    async def __aiter__(self) -> AsyncIterator[PageResult]:
        for _ in range(self._wanted):
            result = self._first or await self._results.get()
            self._first = None
            if isinstance(result, Exception):
                raise result
            yield result

    def cancel(self) -> None:
        """End what is still running, at most a step from now."""
        for task in self._tasks:
            task.cancel()

    async def _work(self) -> None:
        """Read one page after the other, as long as there are any."""
        try:
            for number in self._numbers:
                self._results.put_nowait(await self._page(number))
        except Exception as error:  # handed over to whoever waits for the results, who raises it
            self._results.put_nowait(error)

    async def _page(self, number: int) -> PageResult:
        began = time.monotonic()
        try:
            ready = await run_in_threadpool(self._reader.prepare, self._document, number)
            call = await self._submit(ready)
            try:
                results = await call.results()
            finally:
                call.cancel()
            return await run_in_threadpool(ready.finish, results)
        except KaminariError as error:
            if isinstance(error, FOR_ALL) or (isinstance(error, QueueFullError) and not self._accepted):
                raise
            return fail(self._document, number, error, time.monotonic() - began)

    async def _submit(self, ready: Ready) -> Call:
        """Hand a page to the engine. Once a page of this request has been taken, the others wait for room in the queue."""
        while True:
            try:
                call = Call.submit(self._engine, self._model, ready.asked, self._metrics, self.http_id)
            except QueueFullError as error:
                if not self._accepted or len(ready.asked) > self._engine.config.queue:
                    raise
                await asyncio.sleep(error.retry_after)
            else:
                self._accepted = True
                return call
