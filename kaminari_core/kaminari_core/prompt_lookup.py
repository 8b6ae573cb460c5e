"""Prompt lookup: an index of a row's own text that finds what followed its last few tokens before."""

from __future__ import annotations

from collections.abc import Sequence

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
