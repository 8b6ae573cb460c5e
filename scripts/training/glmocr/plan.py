"""What GLM-OCR's tiny checkpoint is trained on; the draft head begins when the decoder reads."""

from __future__ import annotations

from training.batches import Mix
from training.losses import Weights
from training.plan import Stage

GLANCES = Mix(glimpse=0.15, line=0.4, scramble=0.45)
TOWER = Stage(10, GLANCES, tower_every=1, tower_mix=GLANCES)
LINES = Stage(20, Mix(glimpse=0.12, line=0.58, scramble=0.3, spoken=1.0), tower_mix=GLANCES)
DRAFT = Stage(
    8, Mix(glimpse=0.05, line=0.65, scramble=0.3, spoken=1.0), Weights(draft=0.5), rates=(1.0, 0.6), tower_mix=GLANCES
)
FEW = Stage(20, Mix(glimpse=0.03, line=0.4, scramble=0.27, few=0.3, spoken=1.0), Weights(draft=0.5))
PAGES = Stage(40, Mix(glimpse=0.03, line=0.2, scramble=0.27, few=0.4, receipt=0.1, spoken=1.0), Weights(draft=0.5))
COOL = Stage(30, PAGES.mix, Weights(0.2, 0.2, 0.5), rates=(0.6, 0.0))
COOL_LINES = Stage(7, DRAFT.mix, Weights(0.4, 0.4, 0.5), rates=(0.6, 0.0), tower_mix=GLANCES)

PLANS = {
    "whole": [TOWER, LINES, DRAFT, FEW, PAGES, COOL],
    "further": [PAGES, COOL],
    "lines": [TOWER, LINES, DRAFT, COOL_LINES],
}
