"""The item about the memory plan: what the plugin's footprint says is what the checkpoint and the model have, and serving stays
within the plan."""

from __future__ import annotations

import math
from dataclasses import replace

from kaminari_core.check.outcome import Outcome, failed, judged, not_applicable
from kaminari_core.check.subject import TEXT, Subject, picture
from kaminari_core.errors import RequestError
from kaminari_core.fit import Footprint
from kaminari_core.fit.cases import make_case
from kaminari_core.fit.measured import allocation_peak, serve_once
from kaminari_core.fit.plan import make_plan
from kaminari_core.flow import ImagePart, Message, Prepared, Request, TextPart
from kaminari_core.headers import few, read_headers

SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary", "max_positions")
ABOVE = 1.1
"""How far above the plan a measured peak may be."""


def memory_plan(subject: Subject) -> Outcome:
    """The longest prompt with the largest picture allocates no more than was planned, apart from a tenth."""
    if subject.spec.footprint is None:
        return not_applicable("the plugin names no footprint, so only the size of the weight files is known beforehand")
    footprint: Footprint = subject.spec.load_footprint()(subject.checkpoint)
    if wrong := _wrong_tensors(subject, footprint) or _wrong_sizes(subject, footprint):
        return failed(wrong, ["the footprint is of another architecture, or misses a tensor that is tied or fused"])
    # One slot and short chunks, so that what a picture takes is not lost beside the rest.
    model, config = subject.model, replace(subject.config, slots=1, prefill_chunk=128)
    prepared = _longest(subject)

    def serve() -> None:
        serve_once(model, subject.cache(model, config), prepared, chunk=config.prefill_chunk)

    plan = make_plan(make_case(subject.spec, subject.checkpoint, config, model.device.type), config)
    planned = plan.group("cache") + max(size for phase, size in plan.phases.items() if phase != "loading")
    measured = allocation_peak(serve, model.device)
    detail = (
        f"{len(footprint.tensors)} tensors as in the files; serving {prepared.length} tokens took {measured} bytes beside the "
        f"weights, planned are {planned}"
    )
    suspects = [
        "the vision tower's bytes per patch in the footprint",
        "attention that grows with the square of a prompt",
    ]
    return judged(measured <= ABOVE * planned, detail, suspects, planned=planned, measured=measured)


def _wrong_tensors(subject: Subject, footprint: Footprint) -> str | None:
    """How the footprint's tensors differ from those of the files."""
    planned = {tensor.name: tensor.shape for tensor in footprint.tensors}
    stored = {name: header.shape for name, header in read_headers(subject.checkpoint).items()}
    lacks = sorted(planned.keys() - stored.keys())
    unknown = sorted(stored.keys() - planned.keys())
    other = sorted(name for name in planned.keys() & stored.keys() if planned[name] != stored[name])
    found = {"not in the files": lacks, "not in the footprint": unknown, "of another shape": other}
    lines = [f"{len(names)} tensors are {what}: {few(names)}" for what, names in found.items() if names]
    return "; ".join(lines) or None


def _wrong_sizes(subject: Subject, footprint: Footprint) -> str | None:
    """How the footprint's sizes differ from those of the loaded model."""
    shape = subject.model.shape
    pairs = {name: (getattr(footprint, name), getattr(shape, name)) for name in SIZES}
    pairs["picture unit"] = (footprint.picture.unit if footprint.picture else None, shape.image_unit)
    lines = [f"{name} is {ours}, the model has {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    return "; ".join(lines) or None


def _longest(subject: Subject) -> Prepared:
    """A picture of the largest budget, where the model takes them, and words that fill the context."""
    unit = subject.model.shape.image_unit
    pictures: tuple[ImagePart, ...] = ()
    if unit is not None:
        side = unit * math.isqrt(subject.config.visual_tokens)
        pictures = (picture(side, side),)

    def prepare(words: str) -> Prepared:
        return subject.model.prepare(Request((Message("user", (*pictures, TextPart(words))),)))

    words, step = TEXT, 1 << 10
    found = prepare(words)
    while step:
        try:
            found = prepare(words + TEXT * step)
        except RequestError:
            step //= 2
        else:
            words += TEXT * step
    return found
