"""Reads weights that somebody else has quantized: GPTQ, AWQ and compressed-tensors checkpoints, into our codes, exactly.

Each format is a way to pack the same three numbers (code, zero point, scale) into 32-bit words. Letters: N out, K in, G groups, b
bits, and word w of a packed line holds value 32 / b * w + i in its bits from b * i on, unless said otherwise.

* GPTQ (AutoGPTQ, auto_gptq/nn_modules/qlinear): `qweight` (K b / 32, N) packed along K; `qzeros` (G, N b / 32) packed along N, in
  the first version one less than the zero point; `scales` (G, N); `g_idx` (K), the group of each k.
* AWQ (AutoAWQ, awq/modules/linear/gemm.py): `qweight` (K, N / 8) and `qzeros` (G, N / 8), both packed along N, where the places
  of a word hold values 0, 2, 4, 6, 1, 3, 5, 7; `scales` (G, N).
* compressed-tensors, format pack-quantized (compressors/quantized_compressors/pack_quantized.py): `weight_packed` (N, K b / 32)
  along K, with 2^(b-1) added to the signed code; `weight_scale` (N, G); `weight_zero_point`, signed, likewise packed along N, or
  8-bit integers (N, G), or absent; `weight_shape`; `weight_g_idx` (K) where columns were reordered.

Weights whose columns are reordered need a permutation at run time, which the stored form does not have: they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kaminari_core.errors import CheckpointError
from kaminari_core.headers import TensorHeader, few
from kaminari_core.quantization.scheme import SMALLEST_GROUP, Codes, Scheme
from kaminari_core.quantization.streams import read_tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUPS = (128, 64, 32)
"""The sizes that kernels know. Other groups are split into the largest that divides them, which changes no weight."""


@dataclass(frozen=True, slots=True)
class PublicWeight:
    """One quantized weight (N, K) of a public checkpoint, under the name that it has in full precision."""

    name: str
    shape: tuple[int, int]
    scheme: Scheme
    headers: Mapping[str, TensorHeader]
    unpack: Callable[[Mapping[str, Tensor]], Codes]

    def read(self) -> Codes:
        """The codes of the whole weight. Raises CheckpointError for a layout that cannot be represented."""
        tensors = {part: read_tensor(header) for part, header in self.headers.items()}
        _check_order(self.name, tensors.get("g_idx", tensors.get("weight_g_idx")))
        codes = self.unpack(tensors)
        if not bool((codes.scales >= 0).all() and codes.scales.isfinite().all()):
            raise CheckpointError(f"{self.name} has scales that are negative or not finite")
        repeat = codes.group // self.scheme.group
        return Codes(
            codes.codes, codes.scales.repeat_interleave(repeat, dim=1), codes.zeros.repeat_interleave(repeat, dim=1)
        )


def public_weights(
    where: Path, settings: Mapping[str, Any], headers: Mapping[str, TensorHeader]
) -> dict[str, PublicWeight]:
    """The quantized weights of a checkpoint, by name; `settings` is the `quantization_config` of the file `where`.

    Raises CheckpointError for a method or a variant of one that is not read, naming what would be.
    """
    method = settings.get("quant_method")
    reader = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}.get(str(method))
    if reader is None:
        raise CheckpointError(
            f"{where} has quant_method {method!r}; gptq, awq and compressed-tensors can be repacked, or use the checkpoint "
            "with full-precision weights"
        )
    found = reader(where, settings, headers)
    if not found:
        raise CheckpointError(f"{where} has quant_method {method!r}, but the checkpoint has no weights packed that way")
    return found


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 (..., W) to uint8 (..., W * 32 / bits), the lowest bits of each word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _gptq(where: Path, settings: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, PublicWeight]:
    bits = _bits(where, settings.get("bits"))
    version = settings.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise CheckpointError(f"{where} has the GPTQ checkpoint_format {version!r}; only gptq and gptq_v2 are read")
    if overrides := [key for key in settings.get("dynamic") or {} if not key.startswith("-:")]:
        raise CheckpointError(f"{where} has GPTQ settings of their own for {few(overrides)}, which are not read")

    def unpack(tensors: Mapping[str, Tensor]) -> Codes:
        codes = unpack_words(tensors["qweight"].T.contiguous(), bits)
        zeros = unpack_words(tensors["qzeros"], bits).T + (1 if version == "gptq" else 0)
        return Codes(codes, tensors["scales"].T.to(torch.float32).contiguous(), zeros.contiguous())

    found = {}
    for stem, parts in _grouped(headers, "qweight", ("qweight", "qzeros", "scales", "g_idx"), ("g_idx",)).items():
        words, rows = parts["qweight"].shape
        shape = (rows, words * 32 // bits)
        groups = parts["scales"].shape[0]
        wanted = {"scales": (groups, rows), "qzeros": (groups, rows * bits // 32), "g_idx": (shape[1],)}
        found[f"{stem}.weight"] = _weight(stem, shape, bits, groups, parts, wanted, unpack)
    return found


def _awq(where: Path, settings: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, PublicWeight]:
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm" or settings.get("bits", settings.get("w_bit")) != 4:
        raise CheckpointError(
            f"{where} describes AWQ version {version!r} with {settings.get('bits', settings.get('w_bit'))} bits; only gemm "
            "with 4 bits is read"
        )
    order = torch.tensor(AWQ_ORDER).argsort()

    def values(words: Tensor) -> Tensor:
        return unpack_words(words, 4).view(words.shape[0], -1, 8)[..., order].flatten(1).T.contiguous()

    def unpack(tensors: Mapping[str, Tensor]) -> Codes:
        scales = tensors["scales"].T.to(torch.float32).contiguous()
        return Codes(values(tensors["qweight"]), scales, values(tensors["qzeros"]))

    found = {}
    for stem, parts in _grouped(headers, "qweight", ("qweight", "qzeros", "scales")).items():
        columns, words = parts["qweight"].shape
        groups = parts["scales"].shape[0]
        wanted = {"scales": (groups, words * 8), "qzeros": (groups, words)}
        found[f"{stem}.weight"] = _weight(stem, (words * 8, columns), 4, groups, parts, wanted, unpack)
    return found


def _compressed(
    where: Path, settings: Mapping[str, Any], headers: Mapping[str, TensorHeader]
) -> dict[str, PublicWeight]:
    bits = _compressed_bits(where, settings)
    middle = 1 << (bits - 1)

    def zero_points(tensors: Mapping[str, Tensor], rows: int, groups: int) -> Tensor:
        zeros = tensors.get("weight_zero_point")
        if zeros is None:
            return torch.full((rows, groups), middle, dtype=torch.uint8)
        if zeros.dtype == torch.int8:
            return (zeros.to(torch.int16) + middle).to(torch.uint8)
        return unpack_words(zeros.T.contiguous(), bits).T[:rows].contiguous()

    def unpack(tensors: Mapping[str, Tensor]) -> Codes:
        rows, columns = tensors["weight_shape"].tolist()
        scales = tensors["weight_scale"].to(torch.float32)
        codes = unpack_words(tensors["weight_packed"], bits)[:, :columns].contiguous()
        return Codes(codes, scales, zero_points(tensors, rows, scales.shape[1]))

    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    found = {}
    for stem, tensors in _grouped(headers, "weight_packed", parts, parts[3:]).items():
        rows, columns = (int(size) for size in read_tensor(tensors["weight_shape"]).tolist())
        groups = tensors["weight_scale"].shape[1]
        wanted = {"weight_packed": (rows, -(-columns * bits // 32)), "weight_scale": (rows, groups)}
        if "weight_zero_point" in tensors:
            packed = tensors["weight_zero_point"].dtype == "I32"
            wanted["weight_zero_point"] = (-(-rows * bits // 32) if packed else rows, groups)
        found[f"{stem}.weight"] = _weight(stem, (rows, columns), bits, groups, tensors, wanted, unpack)
    return found


def _compressed_bits(where: Path, settings: Mapping[str, Any]) -> int:
    found = set()
    for name, group in (settings.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        form = group.get("format") or settings.get("format")
        plain = weights.get("type", "int") == "int" and weights.get("strategy") in ("group", "channel")
        if form != "pack-quantized" or not plain or group.get("input_activations"):
            raise CheckpointError(
                f"{where} describes {name} as format {form!r}, type {weights.get('type')!r}, strategy "
                f"{weights.get('strategy')!r}, with {'' if group.get('input_activations') else 'no '}quantized activations; "
                "only pack-quantized whole numbers in groups or channels, with weights alone, are read"
            )
        found.add(_bits(where, weights.get("num_bits")))
    if len(found) != 1:
        raise CheckpointError(
            f"{where} describes weights of {sorted(found) or 'no'} bits, but must describe them of one size"
        )
    return found.pop()


def _bits(where: Path, bits: object) -> int:
    if bits not in (4, 8):
        raise CheckpointError(f"{where} describes weights of {bits} bits; 4 and 8 are supported")
    assert isinstance(bits, int)
    return bits


def _grouped(
    headers: Mapping[str, TensorHeader], first: str, parts: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, dict[str, TensorHeader]]:
    """The tensors of each quantized layer, by the layer's name. Raises CheckpointError for one that lacks some."""
    found = {}
    for name in headers:
        stem, _, part = name.rpartition(".")
        if part != first:
            continue
        found[stem] = {part: headers[f"{stem}.{part}"] for part in parts if f"{stem}.{part}" in headers}
        if missing := [part for part in parts if part not in found[stem] and part not in optional]:
            raise CheckpointError(f"{headers[name].file} has {name}, but no {', '.join(missing)} beside it")
    return found


def _weight(
    stem: str,
    shape: tuple[int, int],
    bits: int,
    groups: int,
    headers: Mapping[str, TensorHeader],
    wanted: Mapping[str, tuple[int, ...]],
    unpack: Callable[[Mapping[str, Tensor]], Codes],
) -> PublicWeight:
    for part, size in wanted.items():
        if part in headers and headers[part].shape != size:
            raise CheckpointError(
                f"{headers[part].name} is {list(headers[part].shape)}, but must be {list(size)} for a weight {list(shape)} "
                f"of {bits} bits in {groups} groups"
            )
    group = shape[1] // max(1, groups)
    if groups < 1 or shape[1] % groups or group < SMALLEST_GROUP or group % SMALLEST_GROUP:
        raise CheckpointError(
            f"{stem} has {groups} groups over {shape[1]} columns; groups must be multiples of {SMALLEST_GROUP}"
        )
    fitting = next(size for size in GROUPS if group % size == 0)
    return PublicWeight(f"{stem}.weight", shape, Scheme(bits, fitting), headers, unpack)


def _check_order(name: str, order: Tensor | None) -> None:
    """Raise CheckpointError where columns do not lie in the order of their groups."""
    if order is None or bool((order < 0).all()):
        return
    groups = int(order.max()) + 1
    if len(order) % groups or not torch.equal(order.long(), torch.arange(len(order)) // (len(order) // groups)):
        raise CheckpointError(
            f"{name} has reordered columns (act-order, desc_act): its g_idx is not in order. That needs a permutation at run "
            "time, which is not supported; use a checkpoint made without it"
        )
