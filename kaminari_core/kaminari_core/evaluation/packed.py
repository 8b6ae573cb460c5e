"""Packed checkpoints for a sweep over quantizers, made from the one evaluated as `kaminari quantize` makes them by default."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kaminari_core.quantization.manifest import is_packed
from kaminari_core.registry import Registry
from kaminari_core.specs import ModelSpec

if TYPE_CHECKING:
    from kaminari_core.protocols import Progress

UNPACKED = ("auto", "none")


def pack_for(
    registry: Registry, spec: ModelSpec, source: Path, quantizers: Iterable[str], folder: Path, progress: Progress
) -> dict[str, Path]:
    """The checkpoint to load for each quantizer: `source` where nothing is to be packed, else a directory in `folder`.

    What is there from an earlier sweep is used again. Raises KaminariError for a quantizer or a checkpoint that cannot be used.
    """
    found = {}
    for name in quantizers:
        target = folder / name
        if name in UNPACKED or is_packed(source):
            found[name] = source
            continue
        if not is_packed(target):
            _pack(registry, spec, source, name, target, progress)
        found[name] = target
    return found


def _pack(registry: Registry, spec: ModelSpec, source: Path, quantizer: str, target: Path, progress: Progress) -> None:
    from kaminari_core.quantization.packing import DEFAULT_GROUP, Order, pack
    from kaminari_core.quantization.source import open_source

    order = Order(quantizer, registry.quantizer(quantizer).load()(), None, DEFAULT_GROUP, "mse")
    pack(spec, open_source(source), target, order, {}, progress)
