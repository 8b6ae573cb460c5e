"""Loads the converted weights of a packed directory: swaps linear layers while they are on meta, and streams codes into them.

The seam: `kaminari_core.weights` finds out where each tensor of a checkpoint goes, whichever way it is stored, and hands over
those that are converted. So fused weights, renamed tensors and ties work for packed checkpoints as they do for others, and a
model package does nothing for it. Every name, shape and scheme is checked before a byte is read; the checksum of each tensor
is checked while it streams, and a load that fails returns no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from kaminari_core.checkpoint_files import Entry
from kaminari_core.errors import CheckpointError
from kaminari_core.headers import TensorHeader
from kaminari_core.quantization.layouts import LayoutName
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.manifest import (
    MANIFEST,
    PARTS,
    SIDECAR,
    Manifest,
    Stored,
    check_files,
    is_packed,
    read_manifest,
)
from kaminari_core.quantization.scheme import Codes, Scheme, unpack_nibbles
from kaminari_core.quantization.streams import as_bytes, read_rows, row_ranges

CONVERTED = "converted"
"""The type of an `Entry` whose weight lies in the sidecar."""
_ROWS = 256
"""Rows are streamed in multiples of this, so that no layout has to take a part of a tile."""


@dataclass(frozen=True, slots=True)
class Part:
    """One converted tensor, and its place: rows from `first_row` on of the weight `target`."""

    name: str
    target: str
    first_row: int

    @property
    def layer(self) -> str:
        """The name of the linear layer whose weight it is."""
        return self.target.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed directory whose files belong together."""

    directory: Path
    manifest: Manifest
    headers: Mapping[str, TensorHeader]

    @property
    def entries(self) -> dict[str, Entry]:
        """The converted weights as if they were tensors of their full shape."""
        file = self.directory / SIDECAR
        return {name: Entry(name, file, one.shape, CONVERTED) for name, one in self.manifest.tensors.items()}

    def bytes(self, name: str) -> int:
        """What one converted weight takes on disk."""
        return sum(self.headers[f"{name}.{part}"].bytes for part in PARTS)

    def same(self, one: str, other: str) -> bool:
        """Whether two converted weights are equal, by their checksums."""
        first, second = self.manifest.tensors[one], self.manifest.tensors[other]
        return (first.shape, first.bits, first.group, first.sha256) == (
            second.shape,
            second.bits,
            second.group,
            second.sha256,
        )

    def swap(self, module: nn.Module, parts: Sequence[Part], layout: LayoutName) -> dict[str, QuantizedLinear]:
        """Replace the linear layers that `parts` fill; returns the new ones by name. Nothing is read.

        Raises CheckpointError for a converted tensor that is no weight of a linear layer, for parts of one weight with
        different schemes, and for a weight of which a part was not converted.
        """
        swapped: dict[str, QuantizedLinear] = {}
        for layer, group in _by_layer(parts).items():
            old = module.get_submodule(layer) if layer != group[0].target else None
            if not isinstance(old, nn.Linear):
                raise self._error(f"{group[0].name} is converted, but no weight of a linear layer in this model")
            found = {Scheme(stored.bits, stored.group) for stored in map(self._stored, group)}
            if len(found) > 1 or sum(self._stored(part).shape[0] for part in group) != old.out_features:
                names = ", ".join(part.name for part in group)
                raise self._error(f"{names} are one weight in this model, but not converted alike")
            with torch.device("meta"):
                bias = old.bias is not None
                new = QuantizedLinear(old.in_features, old.out_features, found.pop(), bias, layout=layout)
            module.set_submodule(layer, new)
            swapped[layer] = new
        return swapped

    def fill(self, layer: QuantizedLinear, part: Part, device: torch.device, dtype: torch.dtype) -> None:
        """Stream the codes of one part into its layer. Raises CheckpointError for codes whose checksum is another."""
        stored = self._stored(part)
        digests = {kind: hashlib.sha256() for kind in PARTS}
        for start, stop in row_ranges(stored.shape[0], stored.shape[1], _ROWS):
            found = {kind: read_rows(self.headers[f"{part.name}.{kind}"], start, stop) for kind in PARTS}
            for kind, tensor in found.items():
                digests[kind].update(as_bytes(tensor))
            codes = unpack_nibbles(found["codes"]) if stored.bits == 4 else found["codes"]
            layer.place(part.first_row + start, Codes(codes, found["scales"].float(), found["zeros"]), device, dtype)
        for kind, digest in digests.items():
            if digest.hexdigest() != stored.sha256[kind]:
                raise self._error(f"{part.name}.{kind} is damaged: its checksum is not the one that {MANIFEST} has")

    def _stored(self, part: Part) -> Stored:
        return self.manifest.tensors[part.name]

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{SIDECAR} of {self.directory} cannot be used: {what}; quantize the checkpoint again")


def open_packed(directory: Path) -> Packed | None:
    """The packed directory, checked as far as headers tell; None when it is an ordinary one. Raises CheckpointError."""
    if not is_packed(directory):
        return None
    manifest = read_manifest(directory)
    return Packed(directory, manifest, check_files(directory, manifest))


def shared_layers(
    packed: Packed, parts: Sequence[Part], ties: Mapping[str, str], absent: Mapping[str, str]
) -> set[str]:
    """The targets that take over the whole layer of what they are tied to: absent ones, and those with the same codes."""
    whole = {part.target: part.name for part in parts}
    return {
        target
        for target, source in ties.items()
        if source in whole and (target in absent or (target in whole and packed.same(whole[target], whole[source])))
    }


def fill_all(
    packed: Packed,
    layers: Mapping[str, QuantizedLinear],
    parts: Sequence[Part],
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[int], None],
) -> None:
    """Stream every part into its layer, in the order of the file; `report` is told the bytes of each."""
    for part in sorted(parts, key=lambda part: packed.headers[f"{part.name}.codes"].offset):
        packed.fill(layers[part.layer], part, device, dtype)
        report(packed.bytes(part.name))


def _by_layer(parts: Sequence[Part]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.layer, []).append(part)
    return found
