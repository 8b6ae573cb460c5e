"""Plans: what is trained for how many minutes of wall clock, so that a run ends when it must whatever the machine does."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.batches import Mix
from training.losses import Weights


@dataclass(frozen=True)
class Stage:
    """A stretch of training.

    `minutes` of wall clock, the picture mix, the loss weights; `budget` is the `cost` of one process's batch; `cool` lets the
    learning rate fall linearly to zero over the stage.
    """

    minutes: float
    mix: Mix
    weights: Weights = field(default_factory=Weights)
    budget: int = 3500
    cool: bool = False


TOWER = Stage(6, Mix(glimpse=0.1, line=0.4, scramble=0.3, few=0.2, receipt=0.1), Weights(read=False), budget=6000)
LINES = Stage(8, Mix(glimpse=0.15, line=0.5, scramble=0.3, few=0.05, spoken=0.1))
FEW = Stage(7, Mix(glimpse=0.05, line=0.4, scramble=0.25, few=0.27, receipt=0.03))
PAGES = Stage(60, Mix(glimpse=0.04, line=0.4, scramble=0.25, few=0.2, receipt=0.12))
COOL = Stage(
    30, Mix(glimpse=0.02, line=0.4, scramble=0.25, few=0.15, receipt=0.2, spoken=0.5), Weights(0.2, 0.2), cool=True
)

PLANS = {"whole": [TOWER, LINES, FEW, PAGES, COOL], "pages": [FEW, PAGES, COOL], "cool": [COOL]}
