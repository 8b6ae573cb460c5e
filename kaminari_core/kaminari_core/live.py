"""The engine's mutable record of one request, from prepared to ended.

State machine, and who moves it (always in the engine thread):

    waiting     in Loop.waiting: prepared, holds nothing        Engine puts it there
    admitted    in Loop.admitted: a slot is claimed at its       the scheduler's answer, acted on by Loop
                first chunk, `length` grows chunk by chunk
    decoding    in Loop.rows, row == slot: one token per step    Loop, when the prompt is complete
    finished    the reply ended by itself or by a limit          Loop, from what Reply.take found
    cancelled   the caller left                                  Engine.cancel, acted on between two steps
    failed      prepare, prefill or decode raised, its logits    Loop, or Engine for prepare and deadlines
                were not finite, or its deadline passed

The last three hold no slot and have sent their last event.
"""

from __future__ import annotations

import time

import torch

from kaminari_core.errors import KaminariError
from kaminari_core.evidence.calibration import Calibration
from kaminari_core.evidence.confidence import confidence_of
from kaminari_core.evidence.loops import LoopGuard
from kaminari_core.flow import Drafts, Embedded, FinishDetail, Prepared, Request, Result, Timings, Usage
from kaminari_core.prompt_lookup import GramIndex
from kaminari_core.protocols import Detokenizer, ModelShape
from kaminari_core.reply import REASONS, Reply
from kaminari_core.sampling import RowSampler
from kaminari_core.serving import Sink
from kaminari_core.stats import peak_memory
from kaminari_core.structured.constraint import Constraint

UNCUT: frozenset[FinishDetail] = frozenset({"end_token", "structure_complete", "max_tokens", "context_full"})
"""Ends at which a reply's text is all that was generated."""


class Live:
    """One request inside the engine.

    `length` counts the cache positions it fills, `slot` is its cache row (-1 while it has none), `chosen` lists the ids of all
    generated tokens, of which the last is not in the cache yet, and `fresh` those of the last step. `grams` is prompt lookup's.
    `held` is when the scheduler first put it off, 0 if it did not; `grouped` whether its batch is prefilled before any of it is
    decoded; `wants_logprobs` whether the log-probabilities of chosen tokens are wanted and no others, and `logprobs` those of the
    last step; `error` what it is about to fail with. `constraint` is where the reply stands in the structure it is held to, if
    any.
    """

    def __init__(
        self,
        prepared: Prepared,
        send: Sink,
        shape: ModelShape,
        detokenizer: Detokenizer,
        device: torch.device,
        *,
        submitted: float,
        max_length: int,
        max_tokens: int,
        constraint: Constraint | None = None,
        guard: LoopGuard | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.prepared, self.send, self.constraint = prepared, send, constraint
        self.submitted, self.ready = submitted, time.monotonic()
        self.held = self.admitted = self.first_token = self.last_token = 0.0
        self.sampling = self.finalize = 0.0
        self.slot, self.length = -1, 0
        self.chosen: list[int] = []
        self.fresh: list[int] = []
        self.logprobs: list[float] = []
        self.proposed = self.accepted = 0
        self.grams: GramIndex | None = None
        self.embedded: Embedded | None = None
        self.batch_size = 0
        self.batch_id: int | None = None
        self.grouped = False
        self.error: KaminariError | None = None
        self._calibration = calibration
        request = prepared.request
        alternatives = request.sampling.logprobs
        self.wants_logprobs = alternatives == 0 or (request.confidence and not alternatives)
        # The first token needs no cache position: it comes from the prompt's last.
        room = max_length - prepared.length + 1
        limit = request.max_tokens or max_tokens
        detail: FinishDetail = "max_tokens" if limit <= room else "context_full"
        end_tokens = () if request.ignore_end else frozenset(shape.end_tokens)
        self.reply = Reply(detokenizer, request.stop, end_tokens, min(limit, room), detail, guard)
        self.sampler = RowSampler(request.sampling, prepared.tokens, shape.vocabulary, device)

    @property
    def request(self) -> Request:
        """The request as it was submitted."""
        return self.prepared.request

    def rotary(self, cursor: int) -> int:
        """The rotary position of the token at cache position `cursor`, which lies behind the prompt or is its last."""
        return self.prepared.next_position + cursor - self.prepared.length

    def note_token(self, now: float, sampling: float) -> None:
        """Record when a token was chosen and this row's share of the time choosing took."""
        self.first_token = self.first_token or now
        self.last_token = now
        self.sampling += sampling

    def result(self, now: float, device: torch.device) -> Result:
        """The whole reply, once `reply.finish` is set."""
        assert self.reply.finish is not None, "an unfinished reply has no result"
        text, tokens = self.reply.text, tuple(self.reply.tokens)
        return Result(
            request_id=self.request.id,
            text=text,
            tokens=tokens,
            finish_reason=REASONS[self.reply.finish],
            finish_detail=self.reply.finish,
            usage=Usage(self.prepared.length, self.prepared.image_tokens, self.reply.generated),
            timings=self._timings(now, device),
            saw=self.prepared.saw,
            batch_size=self.batch_size,
            drafts=Drafts(self.proposed, self.accepted),
            batch_id=self.batch_id,
            complete=self._complete(self.reply.finish),
            repeat=self.reply.repeat,
            confidence=confidence_of(text, tokens, self._calibration) if self.request.confidence else None,
        )

    def _complete(self, finish: FinishDetail) -> bool | None:
        if self.constraint is None:
            return None
        return finish in UNCUT and self.constraint.is_satisfied

    def _timings(self, now: float, device: torch.device) -> Timings:
        decode = self.last_token - self.first_token
        total = now - self.submitted
        return Timings(
            prepare=self.prepared.seconds,
            queue=(self.admitted or now) - self.ready,
            prefill=self.first_token - self.admitted if self.first_token else 0.0,
            ttft=self.first_token - self.submitted if self.first_token else 0.0,
            decode=decode,
            sampling=self.sampling,
            finalize=self.finalize,
            total=total,
            tokens_per_s=(self.reply.generated - 1) / decode if decode > 0 else 0.0,
            images_per_s=len(self.prepared.saw) / total if total > 0 else 0.0,
            memory=peak_memory(device),
            window=(self.admitted or now) - self.held if self.held else 0.0,
        )
