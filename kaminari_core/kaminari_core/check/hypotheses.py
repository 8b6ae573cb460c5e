"""Which classic bug a failure looks like: what is wrong is tried the other way round, and what then agrees is named.

An experiment changes one thing about the model or its inputs for a moment and compares with the stock implementation again. It
reaches into the parts that `kaminari_core.layers` provides, so a model that is built of others is judged by the signature of its
failure alone: which conversations differ, and at which step they begin to.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from kaminari_core.check.compared import difference
from kaminari_core.check.subject import Subject
from kaminari_core.flow import Embedded, Prepared
from kaminari_core.layers import Attention, Decoder, GatedMLP, RMSNorm
from kaminari_core.parity import greedy
from kaminari_core.rope import (
    contiguous_axes,
    half_split_table,
    interleaved_axes,
    inverse_frequencies,
    pairwise_table,
    rotary_positions,
    rotate_half_split,
    rotate_pairwise,
)

STEPS = 4
THETAS = (10_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)
Alter = Callable[[Embedded], Embedded]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A bug by its name, and the experiment that undoes it: `undone` is a context within which the model is mended.

    `prepare` and `alter` mend the inputs instead.
    """

    bug: str
    undone: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    prepare: Callable[[Prepared], Prepared] = lambda prepared: prepared
    alter: Alter = lambda embedded: embedded


def explain(subject: Subject) -> list[str]:
    """What the disagreement with the stock implementation looks like, most certain first. Never empty."""
    tolerance = subject.settings.tolerance
    apart = subject.differences()
    name = max(apart, key=lambda name: apart[name].worst)
    if omitted := _omitted_deepstack(subject):
        return [omitted]
    for hypothesis in hypotheses(subject):
        left = _difference_under(subject, hypothesis, name)
        if left <= tolerance:
            return [f"{hypothesis.bug}: undoing that brings the difference on {name!r} to {left:.2g}"]
    return [_signature(subject)]


def hypotheses(subject: Subject) -> Iterator[Hypothesis]:
    """The experiments that this model allows."""
    decoder = decoder_of(subject.model)
    yield from _inputs(subject)
    if decoder is None:
        return
    rotary = list(_rotary(decoder, _named_sections(subject)))
    yield from (*rotary, *_norms(decoder), *_mlps(decoder))
    for one, other in itertools.combinations(rotary, 2):
        yield Hypothesis(f"{one.bug}, and {other.bug}", partial(_both, one.undone, other.undone))


def decoder_of(model: Any) -> Decoder | None:
    """The core's decoder inside a model, None when it is built of other parts."""
    for value in vars(model).values():
        if isinstance(value, nn.Module):
            for module in value.modules():
                if isinstance(module, Decoder):
                    return module
    return None


def _difference_under(subject: Subject, hypothesis: Hypothesis, name: str) -> float:
    _, theirs = subject.reference_runs(name)
    assert theirs.logits is not None, "the reference kept its logits"
    steps = min(STEPS, len(theirs.tokens))
    with hypothesis.undone():
        prepared = hypothesis.prepare(subject.prepared[name])
        ours = greedy(subject.model, prepared, steps, alter=hypothesis.alter)
    return difference(ours, replace(theirs, tokens=theirs.tokens[:steps], logits=theirs.logits[:steps])).worst


def _inputs(subject: Subject) -> Iterator[Hypothesis]:
    """Mistakes of `prepare` and `embed`, mended from outside."""
    from kaminari_core.check.arithmetic import placeholder_runs

    def counted_on(prepared: Prepared) -> Prepared:
        return replace(prepared, next_position=int(prepared.positions.max()) + 1)

    def on_grids(prepared: Prepared) -> Prepared:
        segments: list[int | tuple[int, int]] = []
        end = 0
        for (start, stop), saw in zip(placeholder_runs(prepared), prepared.saw, strict=False):
            segments += [start - end, saw.grid]
            end = stop
        positions, following = rotary_positions([*segments, prepared.length - end])
        return replace(prepared, positions=positions, next_position=following)

    def shifted(by: int, embedded: Embedded) -> Embedded:
        return replace(embedded, after_layer={layer + by: rows for layer, rows in embedded.after_layer.items()})

    def reversed_layers(embedded: Embedded) -> Embedded:
        after = embedded.after_layer
        return replace(embedded, after_layer=dict(zip(after, reversed(list(after.values())), strict=True)))

    yield Hypothesis(
        "positions without delta (decode counts tokens where pictures take fewer positions)", prepare=counted_on
    )
    if subject.model.shape.image_unit is not None:
        yield Hypothesis("text positions for pictures (M-RoPE rows and columns are missing)", prepare=on_grids)
        yield Hypothesis("deepstack features in the wrong order", alter=reversed_layers)
        yield Hypothesis("deepstack features added a layer too late", alter=partial(shifted, -1))
        yield Hypothesis("deepstack features added a layer too early", alter=partial(shifted, 1))


def _rotary(decoder: Decoder, sections: list[int] | None) -> Iterator[Hypothesis]:
    attentions = [module for module in decoder.modules() if isinstance(module, Attention)]
    halves = [attention for attention in attentions if attention.rotation is rotate_half_split]
    pairs = [attention for attention in attentions if attention.rotation is rotate_pairwise]
    if attentions and len(halves) + len(pairs) == len(attentions):
        style, other, rotation, table = (
            ("half-split", "pairwise", rotate_pairwise, pairwise_table)
            if halves
            else ("pairwise", "half-split", rotate_half_split, half_split_table)
        )

        @contextlib.contextmanager
        def turned() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for attention in attentions:
                    stack.enter_context(_replaced(attention, "rotation", rotation))
                stack.enter_context(_replaced(decoder, "_table", table))
                stack.enter_context(_frequencies(decoder, decoder._frequencies))
                yield

        yield Hypothesis(f"rotation style ({style} here, {other} in the reference)", turned)
    axes = list(decoder._axes)
    if len(set(axes)) > 1:
        sections = sections or [axes.count(axis) for axis in range(max(axes) + 1)]
        layouts = {"interleaved": interleaved_axes(sections), "contiguous": contiguous_axes(sections)}
        here = next((name for name, layout in layouts.items() if layout == axes), "another")
        for name, layout in layouts.items():
            if layout != axes:
                change = partial(_replaced, decoder, "_axes", tuple(layout))
                yield Hypothesis(f"section layout ({here} here, {name} in the reference)", change)
    if decoder._frequencies is not None:
        for theta in THETAS:
            frequencies = inverse_frequencies(2 * len(decoder._frequencies), theta).to(decoder._frequencies.device)
            if not torch.equal(frequencies, decoder._frequencies):
                yield Hypothesis(
                    f"rope theta (the reference has {theta:g})", partial(_frequencies, decoder, frequencies)
                )


def _norms(decoder: Decoder) -> Iterator[Hypothesis]:
    """Norms of one shape inside a layer change places, in all layers alike."""
    shapes: dict[torch.Size, list[str]] = {}
    for name, module in decoder.layers[0].named_modules():
        if isinstance(module, RMSNorm):
            shapes.setdefault(module.weight.shape, []).append(name)
    for names in shapes.values():
        if not 2 <= len(names) <= 4:
            continue
        for order in sorted(itertools.permutations(names), key=lambda order: _moved(names, order)):
            moved = [name for name, other in zip(names, order, strict=True) if name != other]
            if moved:
                bug = f"norms swapped ({' and '.join(moved)} have changed places)"
                yield Hypothesis(bug, partial(_permuted, decoder, tuple(names), order))


def _mlps(decoder: Decoder) -> Iterator[Hypothesis]:
    mlps = [module for module in decoder.modules() if isinstance(module, GatedMLP)]
    if mlps:
        yield Hypothesis("gate and up swapped", partial(_halves_swapped, mlps))


def _named_sections(subject: Subject) -> list[int] | None:
    """The `mrope_section` of config.json, wherever it stands; None without one."""
    waiting: list[Any] = [json.loads((subject.checkpoint / "config.json").read_text(encoding="utf-8"))]
    while waiting:
        place = waiting.pop()
        if isinstance(place, dict):
            if isinstance(place.get("mrope_section"), list):
                return [int(size) for size in place["mrope_section"]]
            waiting += place.values()
    return None


def _omitted_deepstack(subject: Subject) -> str | None:
    """The checkpoint says that the vision tower feeds several layers, and nothing reaches them."""
    top = json.loads((subject.checkpoint / "config.json").read_text(encoding="utf-8"))
    vision = top.get("vision_config")
    layers = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    if not layers:
        return None
    prepared = subject.prepared["one picture"]
    embedded = subject.model.embed(prepared)
    reached = [rows for rows in embedded.after_layer.values() if bool(rows.any())]
    if len(reached) < len(layers):
        missing = f"config.json takes features from blocks {layers}, but embed adds rows after {len(reached)} layers"
        return f"deepstack omitted: {missing}"
    with_rows = greedy(subject.model, prepared, 1)
    without = greedy(subject.model, prepared, 1, alter=lambda embedded: replace(embedded, after_layer={}))
    if difference(with_rows, without).worst == 0.0:
        return "deepstack omitted: embed hands the features over, but prefill does not add them"
    return None


def _signature(subject: Subject) -> str:
    """What can be told from where it differs."""
    tolerance, apart = subject.settings.tolerance, subject.differences()
    prefill = {name for name, each in apart.items() if each.prefill > tolerance}
    pictures = {name for name in apart if subject.prepared[name].saw}
    if not prefill:
        if _ignores_positions(subject):
            return "positions without delta: decode rotates by the cursor and ignores the step's positions"
        return (
            "the prompt is right and decoding drifts: the positions, the delta behind pictures, or the cursor of a step"
        )
    if padded := _padded(subject):
        return padded
    if prefill <= pictures:
        return (
            "text is right and pictures are wrong: M-RoPE positions, section layout, deepstack, or the order of patches"
        )
    return "text is wrong from the first token: a swapped map of weights, the rotation, an epsilon or a scale"


def _ignores_positions(subject: Subject) -> bool:
    prepared = next(iter(subject.prepared.values()))
    moved = replace(prepared, next_position=prepared.next_position + 5)
    return difference(greedy(subject.model, moved, 2), greedy(subject.model, prepared, 2)).worst == 0.0


def _padded(subject: Subject) -> str | None:
    """A prompt that begins with a run of one token, longer for shorter prompts, is padded on the left."""
    by_length = sorted(subject.prepared.values(), key=lambda prepared: prepared.length)
    runs = [len(list(next(itertools.groupby(prepared.tokens))[1])) for prepared in by_length]
    first = by_length[0]
    if runs[0] > 1 and runs[0] >= max(runs):
        return f"left padding: the prompt begins with {runs[0]} times token {first.tokens[0]}"
    return None


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextlib.contextmanager
def _frequencies(decoder: Decoder, frequencies: torch.Tensor | None) -> Iterator[None]:
    """The decoder with other rotary frequencies, its decode table built anew."""
    kept, scalar = decoder._frequencies, decoder._scalar
    assert frequencies is not None and scalar is not None, "set_rotary was not called"
    decoder.set_rotary(frequencies, len(scalar[0]), scalar[0].dtype)
    try:
        yield
    finally:
        decoder._frequencies, decoder._scalar = kept, scalar


@contextlib.contextmanager
def _permuted(decoder: Decoder, names: tuple[str, ...], order: tuple[str, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for layer in decoder.layers:
            weights = [layer.get_submodule(name).weight for name in order]
            for name, weight in zip(names, weights, strict=True):
                stack.enter_context(_replaced(layer.get_submodule(name), "weight", weight))
        yield


@contextlib.contextmanager
def _halves_swapped(mlps: list[GatedMLP]) -> Iterator[None]:
    def swap() -> None:
        for mlp in mlps:
            weight = mlp.gate_up_proj.weight
            weight.data = weight.data.roll(len(weight) // 2, 0)

    swap()
    try:
        yield
    finally:
        swap()


@contextlib.contextmanager
def _both(
    one: Callable[[], AbstractContextManager[None]], other: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    with one(), other():
        yield


def _moved(names: list[str], order: tuple[str, ...]) -> int:
    return sum(name != other for name, other in zip(names, order, strict=True))
