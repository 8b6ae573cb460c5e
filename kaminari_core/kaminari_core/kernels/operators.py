"""The operators of the compiled library, as Python calls them, and what they return when only shapes are known.

The second half is what lets a compiler take each operator as one node of a graph: see `torch.library.register_fake`. The first
half exists for its types: `torch.ops` has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 16
"""Output channels that the packed layout interleaves; see csrc/kernels.h."""


def linear_codes(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, rows: int, group: int, bits: int, activation_bits: int
) -> Tensor:
    """(M, K) to (M, rows) with a packed weight; activations become whole numbers of 8 or 16 bits, by row and group."""
    out: Tensor = torch.ops.kaminari.linear_codes(x, codes, scales, zeros, rows, group, bits, activation_bits)
    return out


def linear_bf16(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 (M, K) to (M, N) with a weight (N, K), summed in float32."""
    out: Tensor = torch.ops.kaminari.linear_bf16(x, weight)
    return out


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, cursors: Tensor) -> Tensor:
    """(R, W, Q, D) over keys and values (slots, K, T, D) to (R, W, Q * D); each query sees the keys up to its cursor (R, W).

    A query whose cursor is the last of the T positions, the spare one, belongs to no request and gets zeros.
    """
    out: Tensor = torch.ops.kaminari.decode_attention(query, keys, values, cursors)
    return out


def dequantize_codes(
    codes: Tensor, scales: Tensor, zeros: Tensor, rows: int, columns: int, group: int, bits: int, out: Tensor
) -> None:
    """Write a packed weight, rounded once, into `out` (rows, columns) of bfloat16 or float32."""
    torch.ops.kaminari.dequantize_codes(codes, scales, zeros, rows, columns, group, bits, out)


def pack_codes(
    codes: Tensor, scales: Tensor, zeros: Tensor, first: int, group: int, bits: int,
    packed: Tensor, packed_scales: Tensor, packed_zeros: Tensor,
) -> None:  # fmt: skip
    """Put rows of codes (n, K), bfloat16 scales and zero points (n, K / group) into a packed weight, from row `first` on."""
    torch.ops.kaminari.pack_codes(codes, scales, zeros, first, group, bits, packed, packed_scales, packed_zeros)


def huge_pages(tensor: Tensor, *, now: bool = False) -> bool:
    """Ask the system for pages of 2 MiB under a tensor: for what is not written yet, or `now` for all of it.

    False where it has none to give.
    """
    given: bool = torch.ops.kaminari.huge_pages(tensor, now)
    return given


def use_instructions(name: str) -> bool:
    """Compute with a lesser instruction set from now on, for tests; "" is the best again. False where this one is not there."""
    there: bool = torch.ops.kaminari.use_instructions(name)
    return there


def register_shapes() -> None:
    """Tell torch what the operators return. Once per process, when the library has been loaded."""
    for name, shapes in (
        ("linear_codes", _linear_codes),
        ("linear_bf16", _linear_bf16),
        ("decode_attention", _decode_attention),
        ("dequantize_codes", _nothing),
        ("pack_codes", _nothing),
    ):
        torch.library.register_fake(f"kaminari::{name}", shapes)


def _linear_codes(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, rows: int, *sizes: int) -> Tensor:
    return x.new_empty(x.shape[0], rows)


def _linear_bf16(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _decode_attention(query: Tensor, keys: Tensor, values: Tensor, cursors: Tensor) -> Tensor:
    rows, width, heads, size = query.shape
    return query.new_empty(rows, width, heads * size)


def _nothing(*arguments: object) -> None:
    return None
