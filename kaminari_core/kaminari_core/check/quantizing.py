"""The item about quantizers: each installed one converts linear layers of the model, names them, and touches nothing else."""

from __future__ import annotations

import copy

from torch import nn

from kaminari_core.check.outcome import Outcome, failed, not_applicable, passed
from kaminari_core.check.subject import Subject
from kaminari_core.protocols import Quantizer


def quantizers(subject: Subject) -> Outcome:
    """What a quantizer says it replaced is what it replaced."""
    if not subject.registry.quantizers:
        return not_applicable("none installed")
    networks = {name: value for name, value in vars(subject.model).items() if isinstance(value, nn.Module)}
    if not networks:
        return not_applicable("the model keeps no torch module to convert")
    lines = []
    for spec in subject.registry.quantizers.values():
        replaced = 0
        for network in networks.values():
            quantizer: Quantizer = spec.load()()
            # The quantizer works before any weight is there, so the copy has none either.
            wrong, count = _swapped(quantizer, copy.deepcopy(network).to("meta"))
            if wrong is not None:
                return failed(f"{spec.name}: {wrong}")
            replaced += count
        if replaced == 0:
            return failed(
                f"{spec.name} converts nothing of this model", ["layers that are no nn.Linear, or other names"]
            )
        lines.append(f"{spec.name} converts {replaced} layers")
    return passed("; ".join(lines), quantizers=len(lines))


def _swapped(quantizer: Quantizer, network: nn.Module) -> tuple[str | None, int]:
    """What is wrong with a quantizer's choice, and how many layers it names."""
    before = {name: type(module) for name, module in network.named_modules()}
    named = set(quantizer.swap(network))
    after = {name: type(module) for name, module in network.named_modules()}
    changed = {name for name, kind in before.items() if after.get(name) is not kind}
    if changed != named:
        odd = sorted(changed ^ named)
        return f"{len(odd)} modules were named but not converted, or the other way round: {', '.join(odd[:3])}", 0
    others = sorted(name for name in named if not issubclass(before[name], nn.Linear))
    if others:
        return f"{', '.join(others[:3])} are no linear layers", 0
    return None, len(named)
