"""The rungs of the ladder, in order: a name, the settings that make it, and which form of the weights it reads.

A rung is data. What it takes to run one, and why one cannot be run, is known to `contenders`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kaminari_core.errors import UnknownNameError
from kaminari_core.protocols import ReferenceMode
from kaminari_core.registry import unknown_name

SOURCE = "source"
"""The form of a checkpoint as it was published; the other forms are packed directories, by the name given for them."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One measured way of decoding.

    `settings` are fields of `EngineConfig`. `stock` names a mode of the stock implementation instead. `form` is the form of the
    weights: `source`, or the name of a packed directory. `rows` requests are decoded together.
    """

    name: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    form: str = SOURCE
    rows: int = 1
    stock: ReferenceMode | None = None


def _ours(name: str, title: str, form: str = SOURCE, rows: int = 1, **settings: Any) -> Rung:
    return Rung(name, title, MappingProxyType(settings), form, rows)


RUNGS: tuple[Rung, ...] = (
    Rung("hf-dynamic", "transformers, dynamic cache", stock="dynamic"),
    Rung("hf-static", "transformers, static cache, compiled", stock="static"),
    _ours("eager", "full precision, torch's operators, eager", compile=False, kernels="aten"),
    _ours("eager-own", "full precision, own operators, eager", compile=False, kernels="own"),
    _ours("compiled", "full precision, torch's operators, compiled", compile=True, kernels="aten"),
    _ours("compiled-own", "full precision, own operators, compiled", compile=True, kernels="own"),
    _ours("int4-head-aten", "int4 and int4 head, torch's operators", "int4-head", compile=True, kernels="aten"),
    _ours("int4", "int4, own operators", "int4", compile=True, kernels="own"),
    _ours("int4-head-a16", "int4 and int4 head, own operators, 16-bit activations", "int4-head",
          compile=True, kernels="own", activation_bits=16),
    _ours("int4-head", "int4 and int4 head, own operators", "int4-head", compile=True, kernels="own"),
    _ours("rows-2", "int4 and int4 head, 2 rows", "int4-head", 2, compile=True, kernels="own"),
    _ours("rows-4", "int4 and int4 head, 4 rows", "int4-head", 4, compile=True, kernels="own"),
    _ours("rows-8", "int4 and int4 head, 8 rows", "int4-head", 8, compile=True, kernels="own"),
    _ours(
        "prompt-lookup", "int4 and int4 head, guesses from the prompt", "int4-head",
        compile=True, kernels="own", draft="prompt-lookup", draft_auto=False,
    ),
    _ours(
        "mtp", "int4 and int4 head, guesses by the draft head", "int4-head",
        compile=True, kernels="own", draft="mtp", draft_tokens=1, draft_auto=False,
    ),
)  # fmt: skip
"""Every rung, in the order of the table."""


def chosen(names: str | None) -> Sequence[Rung]:
    """The rungs that a comma-separated list names, in the ladder's order; all of them for None. Raises UnknownNameError."""
    if names is None:
        return RUNGS
    wanted = [name.strip() for name in names.split(",")]
    known = {rung.name: rung for rung in RUNGS}
    for name in wanted:
        if name not in known:
            raise UnknownNameError(unknown_name("rung", name, known))
    return [rung for rung in RUNGS if rung.name in wanted]
