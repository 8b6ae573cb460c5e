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
    `tower_mix`, or `TOWER_MIX`: that takes a third of the work per picture, and the tower is what limits the error rate.
    """

    minutes: float
    mix: Mix
    weights: Weights = field(default_factory=Weights)
    budget: int = 3500
    rates: tuple[float, float] = (1.0, 1.0)
    tower_every: int = 3
    tower_mix: Mix | None = None


TOWER_MIX = Mix(glimpse=0.06, line=0.15, scramble=0.38, few=0.33, receipt=0.08)
TOWER_BUDGET = 8000
TOWER = Stage(6, Mix(glimpse=0.1, line=0.4, scramble=0.3, few=0.2, receipt=0.1), tower_every=1)
LINES = Stage(8, Mix(glimpse=0.15, line=0.5, scramble=0.3, few=0.05, spoken=0.1))
FEW = Stage(7, Mix(glimpse=0.05, line=0.4, scramble=0.25, few=0.27, receipt=0.03))
PAGES = Stage(25, Mix(glimpse=0.04, line=0.4, scramble=0.25, few=0.2, receipt=0.12))
NARROW = Stage(12, Mix(glimpse=0.03, line=0.15, scramble=0.27, few=0.47, receipt=0.08), rates=(0.78, 0.6))
CROWDED = Stage(
    20,
    Mix(glimpse=0.02, line=0.12, scramble=0.2, few=0.5, receipt=0.16, crowded=0.75),
    rates=(0.6, 0.32),
    tower_every=4,
)
COOL = Stage(
    22,
    Mix(glimpse=0.02, line=0.15, scramble=0.22, few=0.43, receipt=0.18, spoken=0.4, crowded=0.6),
    Weights(0.3, 0.3),
    rates=(0.32, 0.0),
    tower_every=4,
)

WORN = Stage(
    30,
    Mix(line=0.15, scramble=0.15, few=0.3, receipt=0.12, form=0.08, table=0.1, text=0.1, spoken=0.3, damaged=0.4),
    Weights(0.3, 0.3),
    rates=(0.5, 0.0),
    tower_every=4,
)

PLANS = {
    "whole": [TOWER, LINES, FEW, PAGES, NARROW, CROWDED, COOL],
    "further": [CROWDED, COOL],
    # For a reader that already reads clean pages: forms, tables and damage. Not what the bundled checkpoints were trained with.
    "worn": [WORN],
}
