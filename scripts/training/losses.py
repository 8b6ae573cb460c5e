"""The answer loss and the two dense helps that are annealed away: where each character stands, and where to look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.batches import IGNORED, Batch
from training.forward import CLASSES, GUIDES, SLOTS, Outputs


@dataclass(frozen=True)
class Weights:
    """How much each help counts beside the answer loss."""

    dense: float = 1.0
    guide: float = 1.0


def dense_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Give the loss of naming the characters of each patch, and the share of printed characters named right.

    `logits` hold (class, space) scores of the three slots of every patch, in any grouping of patches.
    """
    scores = logits.float().reshape(-1, CLASSES + 1)
    target = batch.characters.reshape(-1)
    printed = target > 0
    named = F.cross_entropy(scores[:, :CLASSES], target)
    spaced = F.binary_cross_entropy_with_logits(scores[printed, CLASSES], batch.spaced.reshape(-1)[printed])
    right = (scores[:, :CLASSES].detach().argmax(-1) == target)[printed].float().mean()
    # Two of three slots are empty on average: the sum over slots keeps the printed ones from being drowned.
    return SLOTS * named + 0.3 * spaced, right


def guide_loss(outputs: Outputs, batch: Batch) -> Tensor:
    """Give the mean negative log-probability that the guided heads give to the right visual token."""
    total = torch.zeros(())
    for (_, _, step), chances in zip(GUIDES, outputs.guides, strict=True):
        target = batch.upcoming if step else batch.reading
        known = target >= 0
        total = total - chances.float()[known].gather(1, target[known][:, None]).clamp_min(-20.0).mean()
    return total / len(GUIDES)


def total_loss(outputs: Outputs, batch: Batch, weights: Weights) -> tuple[Tensor, dict[str, float]]:
    """Give the weighted loss and its parts as numbers."""
    by_patch, right = dense_loss(outputs.patch_logits, batch)
    by_block, block_right = dense_loss(outputs.block_logits, batch)
    loss = weights.dense * (by_patch + by_block)
    parts = {"patch": by_patch.item(), "patch_right": right.item(), "block_right": block_right.item()}
    if outputs.logits is not None:
        answer = F.cross_entropy(outputs.logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        guide = guide_loss(outputs, batch)
        loss = loss + answer + weights.guide * guide
        known = batch.labels != IGNORED
        right_answer = (outputs.logits.detach().argmax(-1) == batch.labels)[known].float().mean()
        parts |= {"answer": answer.item(), "answer_right": right_answer.item(), "guide": guide.item()}
    return loss, parts
