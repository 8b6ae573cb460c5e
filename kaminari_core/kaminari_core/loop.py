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
from kaminari_core.draft import Drafter, Gain
from kaminari_core.errors import EngineError, KaminariError
from kaminari_core.flow import Alternative, Delta, Failed, Finished, Token
from kaminari_core.live import Live
from kaminari_core.protocols import Cache, Model, Scheduler, Waiting
from kaminari_core.sampling import logprobs

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
    ) -> None:
        self._model, self._cache, self._scheduler, self._core = model, cache, scheduler, core
        self._config, self._drafter = config, drafter
        self._drafts_width = config.draft_tokens + 1
        self._gain = Gain(judge=config.draft_auto)
        self.waiting: dict[str, Live] = {}
        self.admitted: deque[Live] = deque()
        self.rows: list[Live] = []
        self.finished: Counter[str] = Counter()
        self.steps = self.decoded_rows = self.prompt_tokens = self.generated_tokens = 0
        self.drafts_proposed = self.drafts_accepted = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.admitted or self.rows)

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
                    self._emit([live], logits[None, None], [[]])
                    self._retire_ended([live])
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
        rows = list(self.rows)
        started = time.monotonic()
        try:
            guesses = self._guess(rows)
            logits = self._core.step(*_feed(rows, guesses, self._drafts_width, self._cache.max_length))
            self.steps += 1
            self.decoded_rows += len(rows)
            before = self.generated_tokens
            self._emit(rows, logits, guesses)
            for live in rows:
                live.length += len(live.fresh)
            self._gain.note(len(rows), any(guesses), self.generated_tokens - before, time.monotonic() - started)
            self._retire_ended(rows)
        except Exception as error:
            failure = _wrapped("decode step", error)
            for index in reversed(range(len(self.rows))):
                self._fail(self._retire(index), failure)

    def _guess(self, rows: Sequence[Live]) -> list[list[int]]:
        """Drafted tokens for each row, no more than may still be generated or than its cache row has room for."""
        if self._drafter is None or not self._gain.drafting(len(rows)):
            return [[] for _ in rows]
        guesses = []
        for live, guess in zip(rows, self._drafter.propose(rows, self._config.draft_tokens), strict=True):
            room = min(live.reply.remaining, self._cache.max_length - live.length) - 1
            guesses.append(guess[: max(0, room)])
            live.proposed += len(guesses[-1])
        return guesses

    def _emit(self, rows: Sequence[Live], logits: Tensor, guesses: Sequence[Sequence[int]]) -> None:
        """Choose tokens for each row from logits (rows, width, vocabulary) and send the new text.

        A row takes one token, and one more for every guess that turns out to be what it chose.
        """
        computed = time.monotonic()
        first = self._choose(rows, logits)
        sampling = (time.monotonic() - computed) / len(rows)
        for live, chosen, row_logits, guess in zip(rows, first, logits, guesses, strict=True):
            begun = time.monotonic()
            live.note_token(begun, sampling)
            self._take(live, chosen, row_logits, guess)
            live.finalize += time.monotonic() - begun
            self.generated_tokens += len(live.fresh)

    def _choose(self, rows: Sequence[Live], logits: Tensor) -> list[list[int]]:
        """The likeliest token at every position, (rows, width), but the sampled one at the first of a row that samples.

        The read at the end is the only wait for the device in a step without drafts.
        """
        with torch.inference_mode():
            chosen = logits.argmax(dim=-1)
            for index, live in enumerate(rows):
                if not live.sampler.is_greedy:
                    chosen[index, 0] = live.sampler.choose(logits[index, 0])
        tokens: list[list[int]] = chosen.tolist()
        return tokens

    def _take(self, live: Live, chosen: Sequence[int], logits: Tensor, guess: Sequence[int]) -> None:
        """Add this step's tokens to a row's reply: go on behind each guess that was chosen."""
        live.fresh = []
        text = ""
        taken: list[Token] = []
        for index in range(len(guess) + 1):
            token = chosen[index]
            if index > 0 and not live.sampler.is_greedy:
                token = int(live.sampler.choose(logits[index]))
            live.sampler.accept(token)
            live.fresh.append(token)
            added, tokens = live.reply.take(token, *_report(live, token, logits[index]))
            text += added
            taken += tokens
            right = index < len(guess) and token == guess[index]
            live.accepted += right
            if live.reply.ended or not right:
                break
        live.chosen += live.fresh
        live.send(Delta(live.request.id, text, tuple(taken)))

    def _retire_ended(self, rows: Sequence[Live]) -> None:
        for live in sorted(rows, key=lambda live: -live.slot):
            if live.reply.ended:
                self._retire(live.slot)
                self._finish(live, "")

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
        self.drafts_proposed += live.proposed
        self.drafts_accepted += live.accepted
        live.send(Finished(live.request.id, result))

    def _fail(self, live: Live, error: KaminariError) -> None:
        self.finished["failed"] += 1
        live.send(Failed(live.request.id, error))


def _feed(
    rows: Sequence[Live], guesses: Sequence[Sequence[int]], width: int, spare: int
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, rotary positions and cursors of a step: each row's last token and its guesses, padded to one width."""
    width = width if any(guesses) else 1
    tokens, positions, cursors = [], [], []
    for live, guess in zip(rows, guesses, strict=True):
        idle = width - 1 - len(guess)
        used = range(live.length, live.length + 1 + len(guess))
        tokens.append([live.chosen[-1], *guess, *[0] * idle])
        positions.append([*map(live.rotary, used), *[0] * idle])
        cursors.append([*used, *[spare] * idle])
    return tokens, positions, cursors


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
