"""The item about pictures: as many placeholders as features, and the features really stand there."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from kaminari_core.check.arithmetic import placeholder_runs
from kaminari_core.check.outcome import Outcome, failed, not_applicable, passed
from kaminari_core.check.subject import Subject, picture
from kaminari_core.config import Sizing
from kaminari_core.flow import Message, Request, TextPart
from kaminari_core.protocols import Model

SIZES = ((200, 150), (64, 64), (31, 17), (500, 60), (60, 500), (333, 777), (1240, 1754))


def image_tokens(subject: Subject) -> Outcome:
    """Over a sweep of sizes and both sizing policies, a picture's placeholders, its patches and its features agree.

    Which hidden states a picture decides is found out by changing its patches: they must be as many as its placeholders, and
    must stand there.
    """
    shape = subject.model.shape
    if shape.image_unit is None:
        return not_applicable("a text-only model")
    counts: list[int] = []
    for sizing in get_args(Sizing):
        model = subject.model if sizing == subject.config.sizing else subject.load(subject.checkpoint, sizing=sizing)
        for size in SIZES:
            wrong = _compare(model, *size)
            if wrong is not None:
                message, suspect = wrong
                return failed(f"{size[0]} x {size[1]} pixels, {sizing} sizing: {message}", [suspect])
            counts.append(model.prepare(_showing(*size)).saw[0].visual_tokens)
    return passed(
        f"{len(SIZES)} sizes in {len(get_args(Sizing))} sizing policies, {min(counts)} to {max(counts)} tokens",
        pictures=len(counts),
        fewest=min(counts),
        most=max(counts),
    )


def _compare(model: Model, width: int, height: int) -> tuple[str, str] | None:
    """What does not agree, and what that looks like; None when all does."""
    one = model.prepare(_showing(width, height))
    if len(one.saw) != 1 or len(one.patches) != 1:
        return f"{len(one.saw)} pictures were seen", "pictures are dropped in silence"
    saw, patches = one.saw[0], one.patches[0]
    if saw.grid[0] * saw.grid[1] != saw.visual_tokens:
        return f"a grid of {saw.grid} is not {saw.visual_tokens} tokens", "the merge of patches is not counted"
    if patches.grid[0] * patches.grid[1] * patches.grid[2] != len(patches.values):
        return f"{len(patches.values)} patches in a grid of {patches.grid}", "the patches are not those of the grid"
    runs = placeholder_runs(one)
    if len(runs) != 1:
        return (
            f"the prompt has no run of {saw.visual_tokens} placeholders",
            "placeholders are counted by another rule than features",
        )
    start, stop = runs[0]
    # Other values everywhere, in margins too, which are alike in all pictures.
    other = replace(one, patches=(replace(patches, values=patches.values.flip(-1) + 0.5),))
    changed = (model.embed(one).hidden != model.embed(other).hidden).any(dim=-1)
    expected = torch.zeros_like(changed)
    expected[start:stop] = True
    if not torch.equal(changed, expected):
        inside = int(changed[start:stop].sum())
        outside = int(changed.sum()) - inside
        return (
            f"{inside} of {stop - start} placeholders hold features, and {outside} other tokens do",
            "features are not written to the placeholders: pictures are dropped, or land elsewhere",
        )
    return None


def _showing(width: int, height: int) -> Request:
    return Request((Message("user", (picture(width, height), TextPart("Read this."))),))
