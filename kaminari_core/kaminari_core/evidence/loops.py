"""Loops: a reply that says the same thing over and over, told from pages that really repeat themselves.

    token by token -> LoopGuard.push -> how many tokens at the end may turn out to be a loop, and `found` when it is one

The tail of a reply has period p when each of its tokens equals the one p before it. It is a loop when, for a period of up to
LONGEST tokens, it is at least REPEATS periods long and at least as long as what one copy says demands (`shortest_loop`). Real
pages have equal rows, dotted leaders and blank cells; a model that loops goes on until its last token. So the lengths are far
beyond what pages have (docs/evidence.md measures both), and a loop is stopped late instead of a page early.

The tokens of a tail that matches an earlier one are what would be cut if it became a loop. A reply holds their text back, so
that streamed text never has to be taken back; it is released when the repetition breaks off.

All periods are compared at once, as one array operation over the last LONGEST tokens: the cost of a token does not depend on
the text or on its length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kaminari_core.config import EngineConfig
from kaminari_core.evidence.facts import Repeat
from kaminari_core.flow import Request
from kaminari_core.tasks import READING, task_of

LONGEST: Final = 256
"""The longest period, in tokens."""
REPEATS: Final = 3
ONE_LINE, ROWS, BLANK_ROWS = 256, 512, 1024
"""Shortest loops in tokens, see `shortest_loop`."""

_TAGS = re.compile(r"<[^<>]*>")
_ROW_MARKS = re.compile(r"[\n|&<]|\\\\")


def guard_for(request: Request, config: EngineConfig, tasks: Mapping[str, str]) -> LoopGuard | None:
    """A guard for a request that wants one, or that has a reading task and does not say. Never where end tokens are ignored."""
    wanted = request.loop_guard
    if wanted is None:
        wanted = config.loop_guard and task_of(request, tasks) in READING
    return LoopGuard() if wanted and not request.ignore_end else None


def shortest_loop(copy: str) -> int:
    """How many tokens of repetitions make a loop, for the text of one copy, wherever the copy is cut.

    BLANK_ROWS for rows and cells without a letter (blank or ruled tables, columns of equal amounts), ROWS for those with one,
    ONE_LINE where there is neither a line break nor the mark of a row or cell in HTML, Markdown or LaTeX (leaders, underscores,
    words): a line of a page is shorter than that.
    """
    if not _ROW_MARKS.search(copy):
        return ONE_LINE
    # A copy that begins inside a tag ends with the tag's beginning.
    start = max(0, copy.find("<"))
    text = _TAGS.sub("", copy[start:] + copy[:start])
    return ROWS if any(character.isalpha() for character in text) else BLANK_ROWS


class LoopGuard:
    """Watches the tokens of one reply.

    `found` is set by the token that completes a loop, with what is to be kept; nothing is pushed after that.
    """

    def __init__(self) -> None:
        # Begins with tokens that equal no other, so that the first ones have something to be compared with.
        self._tokens: NDArray[np.int64] = np.full(2 * LONGEST, -1, np.int64)
        self._end = LONGEST
        self._bytes: list[bytes] = []
        # matches[d] is how many tokens at the end equal those d + 1 before them.
        self._matches: NDArray[np.int64] = np.zeros(LONGEST, np.int64)
        self._demands: dict[int, tuple[int, int]] = {}
        self.found: Repeat | None = None

    def push(self, token: int, data: bytes) -> int:
        """Take a token and its bytes; returns how many tokens at the end equal those one period before, the longest such tail."""
        assert self.found is None, "a reply that loops has ended"
        end = self._end
        if end == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, -1)])
        self._matches += 1
        self._matches *= self._tokens[end - LONGEST : end][::-1] == token
        self._tokens[end] = token
        self._bytes.append(data)
        self._end += 1
        longest = int(self._matches.max())
        if longest >= _LEAST_MATCH:
            self._judge()
        return longest

    def _judge(self) -> None:
        """Look for the shortest period of which there is enough."""
        for index in np.flatnonzero(self._matches >= _ENOUGH[ONE_LINE]).tolist():
            period, matched = index + 1, int(self._matches[index])
            kept = len(self._bytes) - matched
            if matched >= _ENOUGH[self._demand(period, kept)][index]:
                self.found = Repeat(period, (matched + period) // period, kept)
                return

    def _demand(self, period: int, kept: int) -> int:
        """The shortest loop of the copy that ends at token `kept`, worked out once for each tail of a period."""
        known = self._demands.get(period)
        if known is None or known[0] != kept:
            copy = b"".join(self._bytes[kept - period : kept]).decode("utf-8", "replace")
            known = self._demands[period] = kept, shortest_loop(copy)
        return known[1]


def _enough(shortest: int) -> NDArray[np.int64]:
    """How many tokens have to match for each period, so that REPEATS periods and `shortest` tokens are covered."""
    periods = np.arange(1, LONGEST + 1)
    return np.asarray(np.maximum((REPEATS - 1) * periods, shortest - periods), np.int64)


_ENOUGH: Final = {shortest: _enough(shortest) for shortest in (ONE_LINE, ROWS, BLANK_ROWS)}
_LEAST_MATCH: Final = int(_ENOUGH[ONE_LINE].min())
