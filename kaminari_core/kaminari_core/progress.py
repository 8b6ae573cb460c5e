"""Progress of long work, as bars on a terminal and as nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Never

if TYPE_CHECKING:
    from tqdm import tqdm

    from kaminari_core.protocols import Progress


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """A progress function that draws one bar per stage on stderr when that is a terminal, and nothing when it is not."""
    if not sys.stderr.isatty():
        yield silent
        return
    bars = _Bars()
    try:
        yield bars.report
    finally:
        bars.close()


class _Bars:
    """One bar at a time, wiped when its stage ends."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm[Never] | None = None

    def report(self, stage: str, done: int, total: int) -> None:
        """Draw `done` of `total` for a stage."""
        if self._bar is None or stage != self._stage:
            self._open(stage, total)
        assert self._bar is not None
        self._bar.total = total
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Wipe the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _open(self, stage: str, total: int) -> None:
        from tqdm import tqdm

        self.close()
        self._stage = stage
        self._bar = tqdm(total=total, desc=stage, file=sys.stderr, leave=False, dynamic_ncols=True)
