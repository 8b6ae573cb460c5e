"""Average normalized Levenshtein similarity, the measure of DocVQA and its kin for answers that may be misspelt a little.

    similarity = 1 - edits / length of the longer one, and 0 where that is below 0.5 (Biten et al. 2019, arXiv:1905.13648)

Case and white space do not count; of several right answers the closest does.
"""

from __future__ import annotations

from collections.abc import Iterable

from kaminari_core.evaluation.extra import need

THRESHOLD = 0.5


def similarity(answer: str, truths: Iterable[str]) -> float:
    """The similarity of an answer to the closest of the truths, 0 without any."""
    levenshtein = need("rapidfuzz.distance").Levenshtein
    best = max((levenshtein.normalized_similarity(folded(answer), folded(truth)) for truth in truths), default=0.0)
    return float(best) if best >= THRESHOLD else 0.0


def contains(answer: str, truths: Iterable[str]) -> bool:
    """Whether any of the truths stands in the answer, which is how OCRBench counts."""
    return any(folded(truth) in folded(answer) for truth in truths)


def folded(text: str) -> str:
    """A text as it is compared."""
    return " ".join(text.casefold().split())
