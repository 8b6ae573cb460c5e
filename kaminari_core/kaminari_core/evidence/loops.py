"""Loops: a reply that says the same thing over and over, told from pages that really repeat themselves.

    token by token -> LoopGuard.push -> how many tokens at the end may turn out to be a loop, and `found` when it is one

The tail of a reply has period p when each of its tokens equals the one p before it. It is a loop when, for a period of up to
LONGEST tokens, it is COPIES periods long (one and three repeats of it) and has as many characters as what one copy says demands
(`shortest_loop`). Real pages have equal rows, dotted leaders and blank cells; a model that loops goes on until its last token. So
the lengths are beyond what pages have (docs/evidence.md measures both), and a loop is stopped late instead of a page early. They
are counted in characters, for what a page holds does not depend on a tokenizer.

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
COPIES: Final = 4
ONE_LINE, ROWS, BLANK_ROWS = 256, 512, 2048
"""Shortest loops in characters, see `shortest_loop`."""

_TAGS = re.compile(r"<[^<>]*>")
_ROW_MARKS = re.compile(r"[\n|&<]|\\\\")
_CONTINUES = bytes(range(0x80, 0xC0))
"""The bytes that begin no character in UTF-8."""


def guard_for(request: Request, config: EngineConfig, tasks: Mapping[str, str]) -> LoopGuard | None:
    """A guard for a request that wants one, or that has a reading task and does not say. Never where end tokens are ignored.

    A reply that is held to a structure is guarded only where it is asked for: cut, it would no longer have the structure.
    """
    wanted = request.loop_guard
    if wanted is None:
        wanted = config.loop_guard and request.structure is None and task_of(request, tasks) in READING
    return LoopGuard() if wanted and not request.ignore_end else None


def shortest_loop(copy: bytes) -> int:
    """How many characters of repetitions make a loop, for the text of one copy, wherever the copy is cut.

    BLANK_ROWS for rows and cells without a letter (blank or ruled tables, columns of equal amounts), ROWS for those with one,
    ONE_LINE where there is neither a line break nor the mark of a row or cell in HTML, Markdown or LaTeX (leaders, underscores,
    words): a line of a page is shorter than that.
    """
    text = (copy * 2).decode("utf-8", "replace")  # twice, for a copy may be cut inside a character or a mark
    if not _ROW_MARKS.search(text):
        return ONE_LINE
    # A copy that begins inside a tag ends with the tag's beginning.
    start = max(0, text.find("<"))
    words = _TAGS.sub("", text[start:] + text[:start])
    return ROWS if any(character.isalpha() for character in words) else BLANK_ROWS


class LoopGuard:
    """Watches the tokens of one reply.

    `found` is set by the token that completes a loop, with what is to be kept; nothing is pushed after that.
    """

    def __init__(self) -> None:
        # Begins with tokens that equal no other, so that the first ones have something to be compared with.
        self._tokens: NDArray[np.int64] = np.full(4 * LONGEST, -1, np.int64)
        self._characters: NDArray[np.int64] = np.zeros(4 * LONGEST, np.int64)
        """How many there are up to and with each token."""
        self._end = LONGEST
        self._bytes: list[bytes] = []
        self._periods: NDArray[np.int64] = np.arange(1, LONGEST + 1)
        self._matches: NDArray[np.int64] = np.zeros(LONGEST, np.int64)
        """For each period, how many tokens at the end equal those one period before."""
        self._demands: dict[int, int] = {}
        self.found: Repeat | None = None

    def push(self, token: int, data: bytes) -> int:
        """Take a token and its bytes; returns how many tokens at the end equal those one period before, the longest such tail."""
        assert self.found is None, "a reply that loops has ended"
        end = self._end
        if end == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, -1)])
            self._characters = np.concatenate([self._characters, np.zeros_like(self._characters)])
        self._matches += 1
        self._matches *= self._tokens[end - LONGEST : end][::-1] == token
        self._tokens[end] = token
        # A token without text, such as a control token, fills no paper, but goes round in circles like any other.
        self._characters[end] = self._characters[end - 1] + (len(data.translate(None, _CONTINUES)) if data else 1)
        self._bytes.append(data)
        self._end += 1
        if (self._matches >= (COPIES - 1) * self._periods).any():
            self._judge()
        return int(self._matches.max())

    def _judge(self) -> None:
        """Look for the shortest period of which there is enough."""
        tails = self._matches + self._periods
        lengths = self._characters[self._end - 1] - self._characters[self._end - 1 - tails]
        enough = np.flatnonzero((tails >= COPIES * self._periods) & (lengths >= ONE_LINE))
        # A tail with several periods has the shortest one and multiples of it, which say the same.
        _, shortest = np.unique(tails[enough], return_index=True)
        for index in np.sort(enough[shortest]).tolist():
            period, tail = index + 1, int(tails[index])
            first = len(self._bytes) - tail
            if lengths[index] >= self._demand(first, period):
                self.found = Repeat(period, tail // period, first + period)
                return

    def _demand(self, first: int, period: int) -> int:
        """`shortest_loop` of the tail that begins with token `first`, worked out once."""
        if first not in self._demands:
            self._demands[first] = shortest_loop(b"".join(self._bytes[first : first + period]))
        return self._demands[first]
