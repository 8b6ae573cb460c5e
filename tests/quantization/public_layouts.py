"""Writes GPTQ, AWQ and compressed-tensors checkpoints by the published layouts, one value at a time.

Written from the packing side of each project (AutoGPTQ auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py `pack`, AutoAWQ
awq/modules/linear/gemm.py `from_linear`, compressed-tensors quantized_compressors/pack_quantized.py `pack_to_int32`); what is
tested was written from their unpacking side, with whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kaminari_core.quantization.scheme import Codes

Layer = dict[str, Tensor]


def random_codes(rows: int, columns: int, bits: int, group: int, seed: int, *, symmetric: bool = False) -> Codes:
    """Codes of a weight with scales that float16 holds, and not bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    levels, groups = 1 << bits, columns // group
    codes = torch.randint(0, levels, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) * 2**-4 / levels + 2**-6 / levels).half().float()
    # GPTQ stores zero points less one, so 0 has no place in it.
    zeros = torch.randint(1, levels, (rows, groups), generator=generator, dtype=torch.uint8)
    return Codes(codes, scales, torch.full_like(zeros, levels // 2) if symmetric else zeros)


def gptq_layer(codes: Codes, bits: int, *, version: int = 1) -> Layer:
    """qweight packed along K, qzeros along N and less one in version 1, scales transposed, g_idx in order."""
    values, zeros = codes.codes.T.numpy().astype(np.uint32), codes.zeros.T.numpy().astype(np.uint32)
    columns, rows = values.shape
    step = 32 // bits
    qweight = np.zeros((columns // step, rows), np.uint32)
    for k in range(columns):
        qweight[k // step] |= values[k] << np.uint32(bits * (k % step))
    zeros = zeros - np.uint32(1 if version == 1 else 0)
    qzeros = np.zeros((len(zeros), rows // step), np.uint32)
    for n in range(rows):
        qzeros[:, n // step] |= zeros[:, n] << np.uint32(bits * (n % step))
    return {
        "qweight": _int32(qweight),
        "qzeros": _int32(qzeros),
        "scales": codes.scales.T.half().contiguous(),
        "g_idx": torch.tensor([k // codes.group for k in range(columns)], dtype=torch.int32),
    }


def awq_layer(codes: Codes) -> Layer:
    """qweight and qzeros packed along N in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def packed(values: np.ndarray[Any, Any]) -> Tensor:
        words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
        for word in range(words.shape[1]):
            for place in range(8):
                words[:, word] |= values[:, word * 8 + order[place]] << np.uint32(4 * place)
        return _int32(words)

    return {
        "qweight": packed(codes.codes.T.numpy().astype(np.uint32)),
        "qzeros": packed(codes.zeros.T.numpy().astype(np.uint32)),
        "scales": codes.scales.T.half().contiguous(),
    }


def compressed_layer(codes: Codes, bits: int, *, zero_points: str = "none") -> Layer:
    """weight_packed of signed codes plus 2^(bits - 1) along K; zero points are absent, `packed` along N, or plain `int8`."""
    middle, step = 1 << (bits - 1), 32 // bits

    def packed(signed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        unsigned = (signed + middle).astype(np.uint32)
        padded = -len(unsigned[0]) % step
        unsigned = np.pad(unsigned, ((0, 0), (0, padded)))
        words = np.zeros((len(unsigned), unsigned.shape[1] // step), np.uint32)
        for k in range(unsigned.shape[1]):
            words[:, k // step] |= unsigned[:, k] << np.uint32(bits * (k % step))
        return words

    signed = codes.codes.numpy().astype(np.int64) - middle
    zeros = codes.zeros.numpy().astype(np.int64) - middle
    layer = {
        "weight_packed": _int32(packed(signed)),
        "weight_scale": codes.scales.half(),
        "weight_shape": torch.tensor(list(codes.codes.shape), dtype=torch.int64),
    }
    if zero_points == "packed":
        layer["weight_zero_point"] = _int32(packed(zeros.T).T)
    if zero_points == "int8":
        layer["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    return layer


def write(source: Path, out: Path, settings: dict[str, Any], layers: dict[str, Layer]) -> Path:
    """A copy of a checkpoint in which `layers`, by the name without `.weight`, take the place of the full weights."""
    out.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    values = load_file(source / "model.safetensors")
    for stem, layer in layers.items():
        del values[f"{stem}.weight"]
        values |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in layer.items()}
    save_file(values, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}), encoding="utf-8")
    return out


def linear_stems(source: Path) -> dict[str, tuple[int, int]]:
    """The decoder's linear layers of a checkpoint, and their shapes."""
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in load_file(source / "model.safetensors").items()
        if ".language_model.layers." in name and name.endswith("_proj.weight")
    }


def made(
    source: Path, bits: int, group: int, layer: Callable[[Codes], Layer], *, symmetric: bool = False
) -> tuple[dict[str, Codes], dict[str, Layer]]:
    """Random codes for every linear layer of the decoder, and the layers as the format stores them."""
    found = {
        stem: random_codes(rows, columns, bits, group, seed, symmetric=symmetric)
        for seed, (stem, (rows, columns)) in enumerate(linear_stems(source).items())
    }
    return found, {stem: layer(codes) for stem, codes in found.items()}


def _int32(words: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())
