"""The stored form of a quantized weight, which no device or kernel has a say in.

The weight (N, K) of a linear layer is kept as codes of 4 or 8 bits; every `group` neighbours along K share one scale and one
integer zero point:

    weight[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group]

Symmetric forms are the special case of a zero point in the middle, 8 or 128. Kernels make their own layout of it when weights are
loaded; this file has only the formula, so that both sides of it can be held to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_GROUP = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bits of a code, 4 or 8, and how many weights along K share a scale: a multiple of 2, 64 unless there is a reason."""

    bits: int
    group: int = 64

    def __post_init__(self) -> None:
        assert self.bits in (4, 8), f"codes of {self.bits} bits"
        assert self.group > 0 and self.group % 2 == 0, f"groups of {self.group}"

    @property
    def levels(self) -> int:
        """The largest code: 15 or 255."""
        return (1 << self.bits) - 1

    def fits(self, columns: int) -> bool:
        """Whether a weight of `columns` input features is a whole number of groups."""
        return columns > 0 and columns % self.group == 0

    def for_columns(self, columns: int) -> Scheme | None:
        """What fits `columns`: this scheme, or that of half its group and so on; None when not even groups of 32 do."""
        group = self.group
        while columns % group and group // 2 >= SMALLEST_GROUP:
            group //= 2
        return Scheme(self.bits, group) if columns % group == 0 else None


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized weight in memory: `codes` uint8 (N, K), one code a byte; `scales` float32 and `zeros` uint8, (N, K / group)."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.codes.dtype == torch.uint8 and self.zeros.dtype == torch.uint8, "codes and zero points are uint8"
        assert self.scales.dtype == torch.float32, "scales are float32"
        assert self.scales.shape == self.zeros.shape and self.scales.shape[0] == rows, "a scale and zero per group"
        assert columns % self.scales.shape[1] == 0, "groups of one size"

    @property
    def group(self) -> int:
        """How many weights share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K), computed in float32 and rounded once."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, -1, self.group).to(torch.float32)
        weight = (grouped - self.zeros[..., None]) * self.scales[..., None]
        return weight.view(rows, columns).to(dtype)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 (N, K) of codes below 16 to uint8 (N, K / 2): the low half of a byte is the even column."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 (N, K / 2) to uint8 (N, K)."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1)


def quantize(weight: Tensor, scheme: Scheme) -> Codes:
    """Round each weight (N, K) of any float type to the nearest of the levels between the least and the largest of its group.

    The range of a group always holds zero, which is a level, so that zeros stay exact. Scales are rounded to bfloat16 before the
    codes are chosen: a kernel that keeps them so loses nothing more.
    """
    rows, columns = weight.shape
    assert scheme.fits(columns), f"groups of {scheme.group} do not divide {columns} columns"
    grouped = weight.to(torch.float32).view(rows, -1, scheme.group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = stored_scales((high - low) / scheme.levels)
    zeros = torch.round(-low / scales).clamp(0, scheme.levels)
    return encode(weight, scales, zeros, scheme)


def stored_scales(scales: Tensor) -> Tensor:
    """Float32 scales rounded to bfloat16; 1 for a group of nothing but zeros."""
    rounded = scales.to(torch.bfloat16).to(torch.float32)
    return torch.where(rounded > 0, rounded, 1.0)


def encode(weight: Tensor, scales: Tensor, zeros: Tensor, scheme: Scheme) -> Codes:
    """The nearest codes for `weight` (N, K), given float32 scales and whole-number zero points of any type, (N, K / group)."""
    rows, columns = weight.shape
    grouped = weight.to(torch.float32).view(rows, -1, scheme.group)
    codes = torch.round(grouped / scales[..., None]) + zeros[..., None]
    return Codes(codes.clamp(0, scheme.levels).to(torch.uint8).view(rows, columns), scales, zeros.to(torch.uint8))
