"""Prompt lookup: guesses for speculative decoding from the row's own text, with no model behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kaminari_core.live import Live

LONGEST_GRAM, SHORTEST_GRAM = 4, 2
"""Tokens that must agree before what followed them is proposed; longer agreement is preferred."""


class GramIndex:
    """Where each short run of tokens was last seen in a growing text; proposing costs a few lookups at any length."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.taken = 0
        self._append(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens of the reply; `taken` counts them."""
        self.taken += len(tokens)
        self._append(tokens)

    def propose(self, count: int) -> list[int]:
        """What followed the longest run that ends the text now and was seen before."""
        for size in range(min(LONGEST_GRAM, len(self._text)), SHORTEST_GRAM - 1, -1):
            end = self._ends.get(tuple(self._text[-size:]))
            if end is not None:
                return self._text[end : end + count]
        return []

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # A run is entered when a token follows it, so that the text's own end is never found.
            end = len(self._text)
            for size in range(SHORTEST_GRAM, min(LONGEST_GRAM, end) + 1):
                self._ends[tuple(self._text[end - size :])] = end
            self._text.append(token)


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
