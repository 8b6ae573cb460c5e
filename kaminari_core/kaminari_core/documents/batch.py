"""Many pages through an engine: as many in work as keep its slots full, results in the order in which they are done.

A thread makes one page ready and then waits for its answer, so threads mostly sleep. They are as many as the engine has slots and
preparing threads, which bounds the memory that decoded pages take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kaminari_core.documents.document import Document
from kaminari_core.documents.pages import PageReader, PageResult, Ready, fail
from kaminari_core.errors import EngineClosedError, EngineUnhealthyError, KaminariError, QueueFullError
from kaminari_core.flow import Event, Failed, Finished, Request, Result
from kaminari_core.serving import Serving

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Task(Generic[Key]):
    """A page to read; `key` is whatever its result is to be known by."""

    key: Key
    document: Document
    number: int


class BatchReader:
    """Reads pages with an engine. For one run of `read`."""

    def __init__(self, engine: Serving, reader: PageReader) -> None:
        self._engine, self._reader = engine, reader
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[str] = set()

    def read(self, tasks: Iterable[Task[Key]]) -> Generator[tuple[Key, PageResult], None, None]:
        """The results of all tasks, each as soon as it is done. Leaving the iteration early cancels what is in work.

        Raises EngineClosedError and EngineUnhealthyError: an engine that serves nothing is no fault of the pages that are left.
        """
        config = self._engine.config
        most = config.slots + config.prepare_threads
        with ThreadPoolExecutor(most, thread_name_prefix="page") as pool:
            working: dict[Future[PageResult], Key] = {}
            try:
                for task in tasks:
                    if len(working) >= most:
                        yield from _take_done(working)
                    working[pool.submit(self._read, task)] = task.key
                while working:
                    yield from _take_done(working)
            finally:
                self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._stopped.set()
            for request_id in self._open:
                self._engine.cancel(request_id)

    def _read(self, task: Task[Key]) -> PageResult:
        """In a thread of its own: one page from its document to its result."""
        began = time.monotonic()
        try:
            ready = self._reader.prepare(task.document, task.number)
            return ready.finish(self._answers(ready))
        except (EngineClosedError, EngineUnhealthyError):
            raise
        except KaminariError as error:
            return fail(task.document, task.number, error, time.monotonic() - began)

    def _answers(self, ready: Ready) -> list[Result]:
        """The engine's results for all pieces of a page. Raises the error of the first piece that failed."""
        try:
            futures = [self._submit(request) for request in ready.asked]
            return [future.result() for future in futures]
        finally:
            for request in ready.asked:
                self._engine.cancel(request.id)
                with self._lock:
                    self._open.discard(request.id)

    def _submit(self, request: Request) -> Future[Result]:
        answer: Future[Result] = Future()
        while True:
            with self._lock:
                if self._stopped.is_set():
                    raise EngineClosedError("reading was stopped")
                try:
                    self._engine.submit(request, partial(_settle, answer))
                    self._open.add(request.id)
                    return answer
                except QueueFullError as error:
                    pause = error.retry_after
            # Somebody else's requests fill the queue, or there are more pieces than it holds. Nobody waits at this work.
            self._stopped.wait(pause)


def _settle(answer: Future[Result], event: Event) -> None:
    """The sink of a request."""
    match event:
        case Failed(error=error):
            answer.set_exception(error)
        case Finished(result=result) if result.finish_reason == "cancelled":
            answer.set_exception(EngineClosedError("the engine ended this page before it was complete"))
        case Finished(result=result):
            answer.set_result(result)


def _take_done(working: dict[Future[PageResult], Key]) -> Sequence[tuple[Key, PageResult]]:
    """Wait for at least one page, and take out all that are done."""
    done, _ = wait(working, return_when=FIRST_COMPLETED)
    return [(working.pop(future), future.result()) for future in done]
