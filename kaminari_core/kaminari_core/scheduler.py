"""The built-in admission policies. A scheduler answers which waiting requests start now; the loop acts on the answer."""

from __future__ import annotations

from collections.abc import Sequence

from kaminari_core.config import EngineConfig
from kaminari_core.protocols import Waiting


class ContinuousScheduler:
    """Fills every free slot at any step, first come first served."""

    def __init__(self, config: EngineConfig) -> None:
        del config

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str]:
        """The oldest `free` requests."""
        return [request.id for request in waiting[:free]]
