"""The item about quantizers: a checkpoint that each packs loads with the chosen layers converted, and the rest as it was."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from kaminari_core.check.outcome import Outcome, failed, not_applicable, passed
from kaminari_core.check.subject import Subject
from kaminari_core.errors import UsageError
from kaminari_core.progress import silent
from kaminari_core.protocols import Model
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.packing import DEFAULT_GROUP, Order, pack
from kaminari_core.quantization.selection import networks, targets
from kaminari_core.quantization.source import open_source
from kaminari_core.specs import QuantizerSpec

LARGEST_ERROR = {4: 0.3, 8: 0.03}
"""Of a weight, relative, by bits. Rounding to nearest over normal noise has about a third of it."""


def quantizers(subject: Subject) -> Outcome:
    """Each installed quantizer converts what the model's modules name, and leaves every other tensor as it was."""
    if not subject.registry.quantizers:
        return not_applicable("none installed")
    chosen = targets(subject.model, heads=False)
    if not chosen:
        return not_applicable(
            "no module names linear layers to convert (`quantizable`), or the weights are not loaded by kaminari_core.weights"
        )
    lines = []
    for spec in subject.registry.quantizers.values():
        with TemporaryDirectory() as name:
            wrong, error = _packed(subject, spec, Path(name) / "packed", {target.layer for target in chosen})
        if wrong is not None:
            return failed(f"{spec.name}: {wrong}")
        lines.append(f"{spec.name} converts {len(chosen)} layers (weights off by at most {error:.2g})")
    return passed("; ".join(lines), quantizers=len(lines), layers=len(chosen))


def _packed(subject: Subject, spec: QuantizerSpec, out: Path, chosen: set[str]) -> tuple[str | None, float]:
    """What is wrong with the checkpoint packed by a quantizer, and the largest relative error of a weight."""
    quantizer = spec.load()()
    order = Order(spec.name, quantizer, None, DEFAULT_GROUP, "rtn")
    try:
        report = pack(subject.spec, open_source(subject.checkpoint), out, order, {}, silent)
    except UsageError as error:
        return f"the checkpoint cannot be packed: {error}", 0.0
    if report.left:
        chosen = chosen - _left(subject, set(report.left))
    packed = subject.load(out)
    if wrong := _changes(subject.model, packed, chosen):
        return wrong, 0.0
    errors = {name: stored.error or 0.0 for name, stored in report.stored.items()}
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > LARGEST_ERROR[quantizer.bits]:
        return f"the codes of {worst} stand for another weight: off by {errors[worst]:.2g}, relative", 0.0
    return None, errors[worst]


def _left(subject: Subject, names: set[str]) -> set[str]:
    return {
        target.layer
        for target in targets(subject.model, heads=False)
        if any(source.name in names for source in target.sources)
    }


def _changes(full: Model, packed: Model, chosen: set[str]) -> str | None:
    """What differs between two loaded models but the chosen layers, None when nothing does."""
    before, after = networks(full), networks(packed)
    if before.keys() != after.keys():
        return "the packed checkpoint loads into other networks"
    converted: set[str] = set()
    for attribute, network in before.items():
        others = dict(after[attribute].named_modules())
        converted |= {name for name, module in others.items() if isinstance(module, QuantizedLinear)}
        for name, tensor in _plain(network, chosen):
            module, _, leaf = name.rpartition(".")
            if module not in others or not torch.equal(tensor, getattr(others[module], leaf)):
                return f"{name} is another tensor in the packed checkpoint"
    if converted != chosen:
        odd = sorted(converted ^ chosen)
        return f"{len(odd)} layers were named but not converted, or the other way round: {', '.join(odd[:3])}"
    return None


def _plain(network: nn.Module, chosen: set[str]) -> list[tuple[str, torch.Tensor]]:
    """The parameters that must stay as they are."""
    weights = {f"{name}.weight" for name in chosen}
    return [(name, tensor) for name, tensor in network.named_parameters() if name not in weights]
