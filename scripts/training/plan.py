"""Plans: what is trained for how many minutes of wall clock, so that a run ends when it must whatever the machine does."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.batches import Mix
from training.losses import Weights


@dataclass(frozen=True)
class Stage:
    """A stretch of training.

    `minutes` of wall clock, the picture mix, the loss weights; `budget` is the `cost` of one process's batch; `rates` are the
    learning rate's factors at its start and end, linear between them. Every `tower_every`th step trains the vision tower alone on
    `TOWER_MIX`: that takes a third of the work per picture, and the tower is what limits the error rate.
    """

    minutes: float
    mix: Mix
    weights: Weights = field(default_factory=Weights)
    budget: int = 3500
    rates: tuple[float, float] = (1.0, 1.0)
    tower_every: int = 3


TOWER_MIX = Mix(glimpse=0.1, line=0.25, scramble=0.5, few=0.12, receipt=0.03)
TOWER_BUDGET = 8000
TOWER = Stage(6, Mix(glimpse=0.1, line=0.4, scramble=0.3, few=0.2, receipt=0.1), tower_every=1)
LINES = Stage(8, Mix(glimpse=0.15, line=0.5, scramble=0.3, few=0.05, spoken=0.1))
FEW = Stage(7, Mix(glimpse=0.05, line=0.4, scramble=0.25, few=0.27, receipt=0.03))
PAGES = Stage(25, Mix(glimpse=0.04, line=0.4, scramble=0.25, few=0.2, receipt=0.12))
SLOW = Stage(48, Mix(glimpse=0.04, line=0.3, scramble=0.36, few=0.2, receipt=0.1), rates=(1.0, 0.35))
COOL = Stage(
    34,
    Mix(glimpse=0.03, line=0.3, scramble=0.36, few=0.18, receipt=0.13, spoken=0.45),
    Weights(0.2, 0.2),
    rates=(0.35, 0.0),
)

PLANS = {"whole": [TOWER, LINES, FEW, PAGES, SLOW, COOL], "further": [SLOW, COOL]}
