"""The bytes of a checkpoint's weights once they are loaded, by what they belong to.

What is there is read from the headers of the files where there are any; else everything that config.json implies is taken. A
packed directory's manifest says which weights are converted and how; for a plain one, `--quantizer` says what would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kaminari_core.errors import UsageError
from kaminari_core.fit.facts import KINDS, Footprint, Kind, StoredTensor
from kaminari_core.headers import read_headers
from kaminari_core.quantization.manifest import is_packed, read_manifest

BITS: Mapping[str, int] = {"int4": 4, "int8": 8}
"""Bits of a weight under the quantizers whose sizes are known."""
GROUP_BYTES = 4
"""Scale and zero point of one group, in the layout of torch's 4-bit product. The kernels for CPUs need 3."""
BUFFER = 8 * 2**20
"""On a CPU, the part of a quantized weight in bytes that is made full again at a time."""
PLAIN = 16 * 2**20
"""On a card, the elements of one without a product of its own that are; see `quantization.layouts`."""
GROUPS = (64, 32)
"""Weights that share a scale: the first of these that divides a row."""


@dataclass(frozen=True, slots=True)
class Converted:
    """How one weight (N, K) is quantized."""

    bits: int
    group: int

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Codes, scales and zero points in memory."""
        rows, columns = shape
        return rows * columns * self.bits // 8 + rows * (columns // self.group) * GROUP_BYTES

    def rebuilt(self, shape: tuple[int, ...], item: int, device: str) -> int:
        """What a product makes of the weight for a moment. On a card, what torch has no product for is made full in
        float32: the codes, less their zero points, times their scales."""
        rows, columns = shape
        if device == "cpu":
            return min(BUFFER, rows * columns * item)
        served = self.bits == 4 and columns % 128 == 0 and rows % 8 == 0
        return 0 if served else min(PLAIN, rows * columns) * 3 * 4


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes in memory by kind, the draft head's apart.

    `converted` counts quantized weights, and `rebuilt` is the most that a product with one makes of it for a moment. `stored` is
    the size of all files, or what it would be in bfloat16. `notes` say where files and config.json disagree.
    """

    kinds: Mapping[Kind, int]
    draft: int
    converted: int
    rebuilt: int
    stored: int
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.kinds.values()) + self.draft


def stored_bytes(folder: Path, footprint: Footprint) -> int:
    """The size of the tensors in a directory's files; without files, of those that config.json implies in bfloat16."""
    headers = read_headers(folder)
    if headers:
        return sum(header.bytes for header in headers.values())
    return 2 * sum(tensor.elements for tensor in footprint.tensors)


def weigh(
    folder: Path, footprint: Footprint, *, item: int, device: str, quantizer: str, draft: bool, head: str = "none"
) -> Weights:
    """The weights of a checkpoint directory on a kind of device, `item` bytes an element where they are not quantized.

    `quantizer` is `none`, `auto` (whatever the directory is), `int4` or `int8`; `head` is the same for the output head of a plain
    directory. `draft` says whether the draft head is loaded. Raises UsageError for a quantizer whose sizes are not known here.
    """
    how = _conversions(folder, footprint, quantizer, head)
    kinds: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    drafts = 0
    for tensor in footprint.tensors:
        size = how[tensor.name].bytes(tensor.shape) if tensor.name in how else tensor.elements * item
        if not tensor.draft:
            kinds[tensor.kind] += size
        elif draft:
            drafts += size
    shapes = {tensor.name: tensor.shape for tensor in footprint.tensors}
    # A head that is tied in the source and quantized all the same.
    own = {name: (footprint.vocabulary, footprint.hidden) for name in how if name not in shapes}
    kinds["head"] += sum(how[name].bytes(shape) for name, shape in own.items())
    shapes |= own
    rebuilt = max((converted.rebuilt(shapes[name], item, device) for name, converted in how.items()), default=0)
    notes = _disagreements(folder, footprint, how)
    return Weights(kinds, drafts, len(how), rebuilt, stored_bytes(folder, footprint), notes)


def _conversions(folder: Path, footprint: Footprint, quantizer: str, head: str) -> dict[str, Converted]:
    """How each weight that is quantized is, by name."""
    if is_packed(folder):
        stored = read_manifest(folder).tensors
        return {name: Converted(entry.bits, entry.group) for name, entry in stored.items()}
    found: dict[str, Converted] = {}
    if quantizer not in ("none", "auto"):
        found |= {tensor.name: _scheme(quantizer, tensor) for tensor in footprint.tensors if _is_linear(tensor)}
    if head not in ("none", "auto"):
        shape = (footprint.vocabulary, footprint.hidden)
        found["lm_head.weight"] = _scheme(head, StoredTensor("lm_head.weight", shape, "head"))
    return found


def _is_linear(tensor: StoredTensor) -> bool:
    return tensor.kind == "linear" and not tensor.draft


def _scheme(quantizer: str, tensor: StoredTensor) -> Converted:
    if quantizer not in BITS:
        raise UsageError(
            f"the size of weights under the quantizer {quantizer!r} is not known; known: {', '.join(BITS)}"
        )
    return Converted(BITS[quantizer], next((group for group in GROUPS if tensor.shape[-1] % group == 0), GROUPS[-1]))


def _disagreements(folder: Path, footprint: Footprint, how: Mapping[str, Converted]) -> tuple[str, ...]:
    headers = read_headers(folder)
    if not headers:
        return ("the directory has no weight files: sizes follow from config.json",)
    stored = {name.rpartition(".")[0] if name.endswith((".codes", ".scales", ".zeros")) else name for name in headers}
    expected = {tensor.name for tensor in footprint.tensors if not tensor.draft}
    missing = sorted(expected - stored - how.keys())
    if missing:
        return (f"{len(missing)} tensors that config.json describes are not in the files, {missing[0]} among them",)
    return ()
