"""The answer loss and the two dense helps that are annealed away: where each character stands, and where to look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.batches import IGNORED, Batch
from training.forward import CLASSES, GUIDES, QUARTERS, SLOTS, Draft, Outputs


@dataclass(frozen=True)
class Weights:
    """How much each help counts beside the answer loss."""

    dense: float = 1.0
    guide: float = 1.0
    draft: float = 0.0


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


def guide_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Give the mean negative log-probability that the guided heads give to the right visual token, and the loss of telling
    the patch within it."""
    looking, telling = torch.zeros(()), torch.zeros(())
    for (_, _, step), chances in zip(GUIDES, outputs.guides, strict=True):
        target = batch.upcoming if step else batch.reading
        known = target >= 0
        right = chances.float()[known].gather(1, target[known][:, None] // 4)
        looking = looking - right.clamp_min(-20.0).mean() / len(GUIDES)
    for (_, step), logits in zip(QUARTERS, outputs.quarters, strict=True):
        target = batch.upcoming if step else batch.reading
        known = target >= 0
        telling = telling + F.cross_entropy(logits.float()[known], target[known] % 4) / len(QUARTERS)
    return looking, telling


def draft_loss(draft: Draft, batch: Batch) -> tuple[Tensor, Tensor]:
    """Give the loss of guessing the token after the next, with that of looking where it stands, and the share guessed right."""
    labels, target = batch.labels[:, 1:], batch.upcoming[:, 1:]
    known, seen = labels != IGNORED, target >= 0
    guessed = F.cross_entropy(draft.logits.float()[known], labels[known])
    looked = -draft.looking[seen].gather(1, target[seen][:, None] // 4).clamp_min(-20.0).mean()
    right = (draft.logits.detach().argmax(-1) == labels)[known].float().mean()
    return guessed + 0.5 * looked, right


def total_loss(outputs: Outputs, batch: Batch, weights: Weights) -> tuple[Tensor, dict[str, float]]:
    """Give the weighted loss and its parts as numbers."""
    by_patch, right = dense_loss(outputs.patch_logits, batch)
    by_block, block_right = dense_loss(outputs.block_logits, batch)
    loss = weights.dense * (by_patch + by_block)
    parts = {"patch": by_patch.item(), "patch_right": right.item(), "block_right": block_right.item()}
    if outputs.logits is not None:
        answer = F.cross_entropy(outputs.logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        guide, quarter = guide_loss(outputs, batch)
        loss = loss + answer + weights.guide * (guide + 0.5 * quarter)
        known = batch.labels != IGNORED
        right_answer = (outputs.logits.detach().argmax(-1) == batch.labels)[known].float().mean()
        parts |= {"answer": answer.item(), "answer_right": right_answer.item(), "guide": guide.item()}
        parts["quarter"] = quarter.item()
    if outputs.draft is not None:
        guessed, draft_right = draft_loss(outputs.draft, batch)
        loss = loss + weights.draft * guessed
        parts |= {"draft": guessed.item(), "draft_right": draft_right.item()}
    return loss, parts
