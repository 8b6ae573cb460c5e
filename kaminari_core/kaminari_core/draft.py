"""Speculative decoding: cheap guesses at the next tokens, verified together in one step.

A drafter proposes up to k tokens for each row; one step of k + 1 positions per row computes the logits after each of them; the
loop then chooses tokens exactly as it would without drafts, one after the other, and goes on within the same step for as long
as the token it chose is the one that was guessed. So a reply never depends on drafts: greedy rows give the same tokens, and a
sampled row draws from the same distributions, with the same generator, in the same order. (For a guess that is certain of
itself, accepting with probability p(guess) and else drawing from the rest, arXiv:2211.17192, is the same as drawing from p and
comparing.) Keys and values of refused positions are overwritten by the next step: rows begin where their own count ends.

A guess costs time whether or not it is right. `Gain` measures both and turns drafting off while it loses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kaminari_core.decode import DecodeCore
from kaminari_core.live import Live
from kaminari_core.prompt_lookup import GramIndex

logger = logging.getLogger(__name__)


class Drafter(Protocol):
    """Guesses for the rows of one engine."""

    def propose(self, rows: Sequence[Live], count: int) -> list[list[int]]:
        """Up to `count` tokens for each row, most likely continuations of its text; an empty list is no guess."""
        ...


class PromptLookup:
    """Proposes what followed the last few tokens when they last occurred in the row's own prompt or reply.

    Free of any model, and strong where text repeats itself: tables, forms, markup. (The method is known as prompt lookup
    decoding, and as `prompt_lookup_num_tokens` in transformers.)
    """

    def propose(self, rows: Sequence[Live], count: int) -> list[list[int]]:
        """See Drafter."""
        guesses = []
        for live in rows:
            if live.grams is None:
                live.grams = GramIndex(live.prepared.tokens)
            live.grams.extend(live.chosen[live.grams.taken :])
            guesses.append(live.grams.propose(count))
        return guesses


class ModelDrafter:
    """Proposes with the model's own draft head (multi-token prediction), chained for more than one token.

    The head's keys and values lie in the cache's draft layer, and the hidden states it continues from in `cache.state`, where
    prefill and every verifying step leave them. Before it guesses, it runs over the tokens that the last step accepted.
    """

    def __init__(self, core: DecodeCore, count: int) -> None:
        self._core, self._width = core, count + 1

    def propose(self, rows: Sequence[Live], count: int) -> list[list[int]]:
        """See Drafter."""
        spare = self._core.cache.max_length
        tokens, cursors = [], []
        for live in rows:
            fresh = live.fresh
            idle = self._width - len(fresh)
            first = live.length - len(fresh)
            tokens.append([*fresh, *[0] * idle])
            cursors.append([*range(first, live.length), *[spare] * idle])
        ends = [len(live.fresh) - 1 for live in rows]
        guesses: list[list[int]] = [[] for _ in rows]
        for done in range(count):
            positions = [
                [live.rotary(cursor) if cursor < spare else 0 for cursor in row]
                for live, row in zip(rows, cursors, strict=True)
            ]
            logits = self._core.draft_step(tokens, positions, cursors, ends)
            for guess, token in zip(guesses, logits.argmax(dim=-1).tolist(), strict=True):
                guess.append(token)
            tokens = [[guess[-1]] for guess in guesses]
            cursors = [[min(live.length + done, spare)] for live in rows]
            ends = [0] * len(rows)
        return guesses


class Gain:
    """Whether drafting pays at each number of rows: tokens per second with it against without it.

    Both are moving averages over the steps that run anyway; the first step of each kind, which may compile, is left out. A few
    plain steps come first, then drafts are judged at every `WINDOW` of them, and while they lose they are tried again after
    `PAUSE` plain steps.
    """

    PROBE, WINDOW, PAUSE = 4, 16, 256
    WEIGHT = 0.1

    def __init__(self, *, judge: bool = True) -> None:
        self._judge = judge
        self._rates: dict[tuple[int, bool], float] = {}
        self._steps: Counter[tuple[int, bool]] = Counter()
        self._pauses: dict[int, int] = {}

    @property
    def paused(self) -> tuple[int, ...]:
        """The numbers of rows at which drafting is off because it loses."""
        return tuple(sorted(rows for rows, left in self._pauses.items() if left))

    def drafting(self, rows: int) -> bool:
        """Whether the next step of this many rows should try drafts."""
        return not self._judge or (self._steps[rows, False] >= self.PROBE and not self._pauses.get(rows))

    def note(self, rows: int, drafted: bool, tokens: int, seconds: float) -> None:
        """Record a step that produced `tokens` tokens over all its rows."""
        key = rows, drafted
        self._steps[key] += 1
        if self._steps[key] > 1:
            rate = tokens / max(seconds, 1e-9)
            known = self._rates.get(key, rate)
            self._rates[key] = known + self.WEIGHT * (rate - known)
        if not drafted:
            self._pauses[rows] = max(0, self._pauses.get(rows, 0) - 1)
        elif self._judge and self._steps[key] % self.WINDOW == 0 and self._rates[key] < self._rates[rows, False]:
            self._pauses[rows] = self.PAUSE
            logger.info(
                "drafting pauses at %d rows: %.1f tokens/s with it, %.1f without it",
                rows,
                self._rates[key],
                self._rates[rows, False],
            )
