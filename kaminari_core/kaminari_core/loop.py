"""One step of the engine: admit, prefill, decode, emit, retire.

The loop owns the rows. Live rows are always slots 0 .. n - 1: when one retires, the last takes its place. One request is in
prefill at a time, alone, so a bad one fails alone and its arithmetic does not depend on neighbours; it advances by one chunk
per step, so that live rows keep decoding and a request that is cancelled or late ends soon. Everything here runs in the engine
thread.

Failures stay where they are. A row whose logits are not finite fails alone, and its cache row is wiped: what is masked is
multiplied by zero, and zero times not-a-number is not a number, so the slot's next tenant would read it. A step that raises
fails its rows, and the whole cache is wiped; a request in prefill begins it again.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kaminari_core.circuit import Circuit
from kaminari_core.config import EngineConfig
from kaminari_core.decode import DecodeCore
from kaminari_core.draft import Drafter, Gain
from kaminari_core.errors import EngineError, KaminariError, PluginError
from kaminari_core.flow import Delta, Failed, Finished, Token
from kaminari_core.live import Live
from kaminari_core.protocols import Cache, Group, Later, Model, Scheduler, Waiting
from kaminari_core.rows import check_finite, choose, feed, take
from kaminari_core.structured.masks import Masks
from kaminari_core.watch import Watch

logger = logging.getLogger(__name__)


class Loop:
    """The rows of one engine and the step that moves them on."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        scheduler: Scheduler,
        config: EngineConfig,
        core: DecodeCore,
        drafter: Drafter | None,
        watch: Watch,
    ) -> None:
        self._model, self._cache, self._scheduler, self._core = model, cache, scheduler, core
        self._config, self._drafter, self._watch = config, drafter, watch
        self.circuit = Circuit()
        self._drafts_width = config.draft_tokens + 1
        self.masks = Masks(cache.slots * max(core.widths), model.shape.vocabulary, model.device)
        self._gain = Gain(judge=config.draft_auto)
        self.waiting: dict[str, Live] = {}
        self.admitted: deque[Live] = deque()
        self.rows: list[Live] = []
        self.batches = 0
        self._ask_at = math.inf
        """When the scheduler is to be asked again while nothing runs."""
        self.last_step: float | None = None
        self.steps = self.decoded_rows = self.prompt_tokens = self.generated_tokens = 0
        self.drafts_proposed = self.drafts_accepted = 0

    @property
    def idle(self) -> bool:
        """Whether there is no request here."""
        return not (self.waiting or self.admitted or self.rows)

    @property
    def next_step(self) -> float:
        """The time.monotonic() at which `step` has something to do; infinity while only a change can bring work."""
        if self.admitted or self.rows:
            return 0.0
        return self._ask_at if self.waiting else math.inf

    @property
    def drafting_paused(self) -> tuple[int, ...]:
        """The numbers of rows at which drafting is off because it loses."""
        return self._gain.paused

    @property
    def running(self) -> int:
        """Requests that have been admitted and not ended."""
        return len(self.admitted) + len(self.rows)

    def add(self, live: Live) -> None:
        """Queue a prepared request."""
        if refusal := self.circuit.refusal():
            self._fail(live, refusal)
            return
        self.waiting[live.request.id] = live
        self._ask_at = 0.0

    def step(self) -> None:
        """Admit what the scheduler allows, advance prefill, decode one token for every live row."""
        self._admit()
        if self.admitted:
            self._prefill()
        if self.rows and not any(live.grouped for live in self.admitted):
            self._decode()

    def probe(self) -> None:
        """A decode step without a request. While rows are live it is not needed: their steps run between any two calls."""
        if self.rows:
            return
        try:
            self._core.probe()
        except Exception as error:
            failure = _wrapped("decode step", error)
            self._recover(failure)
            raise failure from error
        self._succeeded()

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is; False when it is not here."""
        live = self._remove(request_id)
        if live is not None:
            self._finish(live, *live.reply.cancel())
        return live is not None

    def fail(self, request_id: str, error: KaminariError) -> bool:
        """End a request with an error wherever it is; False when it is not here."""
        live = self._remove(request_id)
        if live is not None:
            self._fail(live, error)
        return live is not None

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

    def _remove(self, request_id: str) -> Live | None:
        """Take a request out, leaving its slot free; None when it is not here."""
        if live := self.waiting.pop(request_id, None):
            self._ask_at = 0.0
            return live
        for live in self.admitted:
            if live.request.id == request_id:
                self.admitted.remove(live)
                self._leave_prefill(live)
                return live
        for row, live in enumerate(self.rows):
            if live.request.id == request_id:
                return self._retire(row)
        return None

    def _admit(self) -> None:
        free = self._cache.slots - self.running
        if not self.waiting or free < 1:
            return
        now = time.monotonic()
        queue = [
            Waiting(live.request.id, live.ready, live.prepared.length, live.request.priority)
            for live in sorted(self.waiting.values(), key=lambda live: live.submitted)
        ]
        answer = self._scheduler.admit(queue, free, self.running, now)
        self._ask_at = math.inf
        if isinstance(answer, Later):
            self._ask_at = answer.at
            for live in self.waiting.values():
                live.held = live.held or now
            return
        grouped = isinstance(answer, Group)
        ids = (answer.ids if isinstance(answer, Group) else answer)[:free]
        if not ids:
            return
        if len(set(ids)) < len(ids) or not self.waiting.keys() >= set(ids):
            raise PluginError(
                f"the scheduler {self._config.scheduler!r} started {', '.join(map(repr, ids))}, but each id must be of a "
                "request that waits, and be there once"
            )
        self._watch.starting(ids)
        self.batches += 1
        for request_id in ids:
            live = self.waiting.pop(request_id)
            live.admitted, live.batch_id, live.grouped = now, self.batches, grouped
            self.admitted.append(live)

    def _next_prefill(self) -> Live:
        """The request whose prompt is begun, else the oldest interactive one, else the oldest."""
        return min(self.admitted, key=lambda live: (live.embedded is None, live.request.priority == "batch"))

    def _prefill(self) -> None:
        """Advance an admitted request by a chunk of its prompt."""
        live = self._next_prefill()
        try:
            with torch.inference_mode():
                if live.embedded is None:
                    live.slot = self._cache.claim()
                    live.embedded = self._model.embed(live.prepared)
                stop = min(live.length + self._config.prefill_chunk, live.prepared.length)
                logits = self._model.prefill(live.embedded, live.length, stop, self._cache, live.slot)
                live.length = stop
                if live.length == live.prepared.length:
                    # Before it moves: only the slot it is in is wiped.
                    check_finite(logits)
                    self._enter(live)
                    self._emit([live], logits[None, None], [[]])
                    self._retire_ended([live])
        except Exception as error:
            self._drop(live)
            self._fail(live, _wrapped("prefill", error))

    def _enter(self, live: Live) -> None:
        """A prompt is complete: give it the row behind the last live one."""
        self.admitted.remove(live)
        row = len(self.rows)
        if live.slot != row:
            self._cache.move(live.slot, row, live.length)
        live.slot, live.embedded = row, None
        self.rows.append(live)
        self.prompt_tokens += live.length
        for neighbour in self.rows:
            neighbour.batch_size = max(neighbour.batch_size, len(self.rows))

    def _decode(self) -> None:
        rows = list(self.rows)
        started = time.monotonic()
        try:
            guesses = self._guess(rows)
            logits = self._core.step(*feed(rows, guesses, self._drafts_width, self._cache.max_length))
            self.steps += 1
            self.decoded_rows += len(rows)
            before = self.generated_tokens
            self._emit(rows, logits, guesses)
            for live in rows:
                live.length += len(live.fresh)
            self._gain.note(len(rows), any(guesses), self.generated_tokens - before, time.monotonic() - started)
            self._retire_ended(rows)
        except Exception as error:
            self._recover(_wrapped("decode step", error))
        else:
            self._succeeded()

    def _succeeded(self) -> None:
        self.last_step = time.monotonic()
        self.circuit.succeeded()

    def _recover(self, failure: KaminariError) -> None:
        """A step failed: fail its rows, forget all keys and values, and begin again what was in prefill.

        Whatever raises here leaves nothing to go on with, and ends the engine thread.
        """
        self.circuit.failed(str(failure))
        failed = [self._retire(index) for index in reversed(range(len(self.rows)))]
        for live in self.admitted:
            self._leave_prefill(live)
        for buffer in (self._cache.keys, self._cache.values, self._cache.state):
            if buffer is not None:
                buffer.zero_()
        for live in failed:
            self._fail(live, failure)
        if refusal := self.circuit.refusal():
            self.fail_all(refusal)

    def _guess(self, rows: Sequence[Live]) -> list[list[int]]:
        """Drafted tokens for each row, no more than may still be generated or than its cache row has room for."""
        if self._drafter is None or not self._gain.drafting(len(rows)):
            return [[] for _ in rows]
        guesses = []
        for live, guess in zip(rows, self._drafter.propose(rows, self._config.draft_tokens), strict=True):
            room = min(live.reply.remaining, self._cache.max_length - live.length) - 1
            guess = guess[: max(0, room)]
            if live.constraint is not None:
                guess = guess[: live.constraint.allowed(guess)]
            guesses.append(guess)
            live.proposed += len(guess)
        return guesses

    def _emit(self, rows: Sequence[Live], logits: Tensor, guesses: Sequence[Sequence[int]]) -> None:
        """Choose tokens for each row from logits (rows, width, vocabulary) and send the new text.

        A row takes one token, and one more for every guess that turns out to be what it chose.
        """
        computed = time.monotonic()
        first, forbidden = choose(rows, logits, guesses, self.masks)
        sampling = (time.monotonic() - computed) / len(rows)
        for live, chosen, row_logits, guess, banned in zip(rows, first, logits, guesses, forbidden, strict=True):
            begun = time.monotonic()
            live.note_token(begun, sampling)
            take(live, chosen, row_logits, guess, banned)
            live.finalize += time.monotonic() - begun
            self.generated_tokens += len(live.fresh)

    def _retire_ended(self, rows: Sequence[Live]) -> None:
        for live in sorted(rows, key=lambda live: -live.slot):
            if live.error is not None:
                self._wipe(live.slot)
                self._fail(self._retire(live.slot), live.error)
            elif live.reply.ended:
                self._retire(live.slot)
                self._finish(live)

    def _retire(self, row: int) -> Live:
        """Free a row; the last live row moves into its place."""
        self._ask_at = 0.0
        live, last = self.rows[row], self.rows.pop()
        self._cache.release(row)
        if last is not live:
            self._cache.move(last.slot, row, last.length)
            last.slot = row
            self.rows[row] = last
        return live

    def _leave_prefill(self, live: Live) -> None:
        self._ask_at = 0.0
        if live.slot >= 0:
            # Its logits have not been looked at, so nobody knows whether what it stored is finite.
            self._wipe(live.slot)
            self._cache.release(live.slot)
            live.slot, live.length, live.embedded = -1, 0, None

    def _wipe(self, slot: int) -> None:
        self._cache.keys[:, slot].zero_()
        self._cache.values[:, slot].zero_()
        if self._cache.state is not None:
            self._cache.state[slot].zero_()

    def _drop(self, live: Live) -> None:
        """Take a failed request out of wherever prefill left it."""
        if live in self.admitted:
            self.admitted.remove(live)
            self._leave_prefill(live)
        elif live in self.rows:
            self._retire(live.slot)

    def _finish(self, live: Live, text: str = "", tokens: tuple[Token, ...] = ()) -> None:
        if text or tokens:
            live.send(Delta(live.request.id, text, tokens))
        result = live.result(time.monotonic(), self._model.device)
        self.drafts_proposed += live.proposed
        self.drafts_accepted += live.accepted
        live.send(Finished(live.request.id, result))

    def _fail(self, live: Live, error: KaminariError) -> None:
        live.send(Failed(live.request.id, error))


def _wrapped(stage: str, error: Exception) -> KaminariError:
    """The error that a request ends with. What users caused is passed on; what broke is logged with its stack."""
    if isinstance(error, KaminariError):
        return error
    logger.error("the %s failed", stage, exc_info=error)
    if isinstance(error, torch.OutOfMemoryError):
        return EngineError(f"the {stage} ran out of device memory; lower --slots, --max-length or --visual-tokens")
    return EngineError(f"the {stage} failed: {type(error).__name__}: {error}")
