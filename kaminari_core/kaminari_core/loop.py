"""One step of the engine: admit, prefill, decode, emit, retire.

The loop owns the rows. Live rows are always slots 0 .. n - 1: when one retires, the last takes its place. One request is in
prefill at a time, alone, so a bad one fails alone and its arithmetic does not depend on neighbours; with live rows around, it
advances by one chunk per step so that they keep decoding. Everything here runs in the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kaminari_core.config import EngineConfig
from kaminari_core.decode import DecodeCore
from kaminari_core.errors import EngineError, KaminariError
from kaminari_core.flow import Alternative, Delta, Failed, Finished
from kaminari_core.live import Live
from kaminari_core.protocols import Cache, Model, Scheduler, Waiting
from kaminari_core.sampling import logprobs

logger = logging.getLogger(__name__)


class Loop:
    """The rows of one engine and the step that moves them on."""

    def __init__(
        self, model: Model, cache: Cache, scheduler: Scheduler, config: EngineConfig, core: DecodeCore
    ) -> None:
        self._model, self._cache, self._scheduler, self._core = model, cache, scheduler, core
        self._config = config
        self.waiting: dict[str, Live] = {}
        self.admitted: deque[Live] = deque()
        self.rows: list[Live] = []
        self.finished: Counter[str] = Counter()
        self.steps = self.decoded_rows = self.prompt_tokens = self.generated_tokens = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.admitted or self.rows)

    @property
    def running(self) -> int:
        """Requests that have been admitted and not ended."""
        return len(self.admitted) + len(self.rows)

    def add(self, live: Live) -> None:
        """Queue a prepared request."""
        self.waiting[live.request.id] = live

    def step(self) -> None:
        """Admit what the scheduler allows, advance prefill, decode one token for every live row."""
        self._admit()
        if self.admitted:
            self._prefill()
        if self.rows:
            self._decode()

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is; False when it is not here."""
        if live := self.waiting.pop(request_id, None):
            self._finish(live, live.reply.cancel())
            return True
        for live in self.admitted:
            if live.request.id == request_id:
                self.admitted.remove(live)
                self._leave_prefill(live)
                self._finish(live, live.reply.cancel())
                return True
        for index, live in enumerate(self.rows):
            if live.request.id == request_id:
                tail = live.reply.cancel()
                self._retire(index)
                self._finish(live, tail)
                return True
        return False

    def fail_all(self, error: KaminariError) -> None:
        """End everything with an error, leaving all slots free."""
        for index in reversed(range(len(self.rows))):
            self._fail(self._retire(index), error)
        while self.admitted:
            live = self.admitted.popleft()
            self._leave_prefill(live)
            self._fail(live, error)
        while self.waiting:
            self._fail(self.waiting.pop(next(iter(self.waiting))), error)

    def _admit(self) -> None:
        free = self._cache.slots - self.running
        if not self.waiting or free < 1:
            return
        queue = [Waiting(live.request.id, live.ready, live.prepared.length) for live in self.waiting.values()]
        for request_id in self._scheduler.admit(queue, free, self.running, time.monotonic())[:free]:
            live = self.waiting.pop(request_id)
            live.admitted = time.monotonic()
            self.admitted.append(live)

    def _prefill(self) -> None:
        """Advance the oldest admitted request by a chunk, or to its end when no row is waiting for its next token."""
        live = self.admitted[0]
        started = time.monotonic()
        logits: Tensor | None = None
        try:
            with torch.inference_mode():
                if live.embedded is None:
                    live.slot = self._cache.claim()
                    live.embedded = self._model.embed(live.prepared)
                while live.length < live.prepared.length and (logits is None or not self.rows):
                    stop = min(live.length + self._config.prefill_chunk, live.prepared.length)
                    logits = self._model.prefill(live.embedded, live.length, stop, self._cache, live.slot)
                    live.length = stop
                if live.length == live.prepared.length:
                    assert logits is not None, "a prompt has at least one token"
                    self._enter(live)
                    self._emit([live], logits[None], started)
        except Exception as error:
            self._drop(live)
            self._fail(live, _wrapped("prefill", error))

    def _enter(self, live: Live) -> None:
        """A prompt is complete: give it the row behind the last live one."""
        self.admitted.popleft()
        row = len(self.rows)
        if live.slot != row:
            self._cache.move(live.slot, row, live.length)
        live.slot, live.embedded = row, None
        self.rows.append(live)
        self.prompt_tokens += live.length
        for neighbour in self.rows:
            neighbour.batch_size = max(neighbour.batch_size, len(self.rows))

    def _decode(self) -> None:
        rows = self.rows
        started = time.monotonic()
        try:
            logits = self._core.step(
                [live.last for live in rows], [live.position for live in rows], [live.length for live in rows]
            )
            for live in rows:
                live.length += 1
                live.position += 1
            self.steps += 1
            self.decoded_rows += len(rows)
            self._emit(list(rows), logits[:, 0], started)
        except Exception as error:
            failure = _wrapped("decode step", error)
            for index in reversed(range(len(rows))):
                self._fail(self._retire(index), failure)

    def _emit(self, rows: Sequence[Live], logits: Tensor, started: float) -> None:
        """Choose one token per row from logits (rows, vocabulary), send the new text, end the rows that are done."""
        computed = time.monotonic()
        tokens = self._choose(rows, logits)
        chosen = time.monotonic()
        for live, token, row_logits in zip(rows, tokens, logits, strict=True):
            begun = time.monotonic()
            live.note_token(begun, (chosen - computed) / len(rows))
            live.last = token
            logprob, top = _report(live, token, row_logits)
            text, taken = live.reply.take(token, logprob, top)
            live.send(Delta(live.request.id, text, taken))
            live.finalize += time.monotonic() - begun
        self.generated_tokens += len(rows)
        for live in sorted(rows, key=lambda live: -live.slot):
            if live.reply.finish is not None:
                self._retire(live.slot)
                self._finish(live, "")

    def _choose(self, rows: Sequence[Live], logits: Tensor) -> list[int]:
        """One token id per row. The only wait for the device in a step is the read at the end."""
        with torch.inference_mode():
            chosen = logits.argmax(dim=-1)
            for index, live in enumerate(rows):
                if not live.sampler.is_greedy:
                    chosen[index] = live.sampler.choose(logits[index])
        tokens: list[int] = chosen.tolist()
        for live, token in zip(rows, tokens, strict=True):
            live.sampler.accept(token)
        return tokens

    def _retire(self, row: int) -> Live:
        """Free a row; the last live row moves into its place."""
        live, last = self.rows[row], self.rows.pop()
        self._cache.release(row)
        if last is not live:
            self._cache.move(last.slot, row, last.length)
            last.slot = row
            self.rows[row] = last
        return live

    def _leave_prefill(self, live: Live) -> None:
        if live.slot >= 0:
            self._cache.release(live.slot)
            live.slot, live.embedded = -1, None

    def _drop(self, live: Live) -> None:
        """Take a failed request out of wherever prefill left it."""
        if live in self.admitted:
            self.admitted.remove(live)
            self._leave_prefill(live)
        elif live in self.rows:
            self._retire(live.slot)

    def _finish(self, live: Live, tail: str) -> None:
        if tail:
            live.send(Delta(live.request.id, tail, ()))
        result = live.result(time.monotonic(), self._model.device)
        self.finished[result.finish_reason] += 1
        live.send(Finished(live.request.id, result))

    def _fail(self, live: Live, error: KaminariError) -> None:
        self.finished["failed"] += 1
        live.send(Failed(live.request.id, error))


def _report(live: Live, token: int, logits: Tensor) -> tuple[float | None, tuple[Alternative, ...]]:
    """The chosen token's log-probability and the most likely alternatives, where the request asked for them."""
    count = live.request.sampling.logprobs
    if count is None:
        return None, ()
    own, top = logprobs(logits, token, count)
    return own, tuple(live.reply.alternative(other, value) for other, value in top)


def _wrapped(stage: str, error: Exception) -> KaminariError:
    """The error that a request ends with. What users caused is passed on; what broke is logged with its stack."""
    if isinstance(error, KaminariError):
        return error
    logger.error("the %s failed", stage, exc_info=error)
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError(f"the {stage} ran out of device memory; lower --slots, --max-length or --visual-tokens")
    return EngineError(f"the {stage} failed: {type(error).__name__}: {error}")
