"""How far a rate may be off because these pages and no others were read: a bootstrap over pages.

Pages are drawn with replacement, as many as there are, again and again; the interval is between percentiles of the rates of those
draws (Efron 1979). It says nothing about pages of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence

DRAWS = 2000


def bootstrap(
    edits: Sequence[int], lengths: Sequence[int], *, seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """The interval of sum(edits) / sum(lengths) over pages, with 95 % of the draws inside; None for fewer than two pages."""
    import numpy as np

    if len(edits) < 2 or not any(lengths):
        return None
    picks = np.random.default_rng(seed).integers(0, len(edits), (DRAWS, len(edits)))
    rates = np.asarray(edits)[picks].sum(1) / np.maximum(1, np.asarray(lengths)[picks].sum(1))
    low, high = np.quantile(rates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired(
    edits: Sequence[int], others: Sequence[int], lengths: Sequence[int], *, seed: int = 0
) -> tuple[float, float] | None:
    """The interval of how much higher the rate of `edits` is than that of `others`, page by page the same pages.

    Pages that both read alike do not widen it, so it tells differences that the two intervals by themselves hide.
    """
    return bootstrap([ours - theirs for ours, theirs in zip(edits, others, strict=True)], lengths, seed=seed)
