"""Rotary position embeddings, in the two layouts of each choice that the model families make.

A position has one or more axes (M-RoPE: time, height, width). Every rotary frequency belongs to one axis; which one is the
*section layout* (interleaved or contiguous). Which two features turn together is the *rotation* (half split or pairwise). The
choices are independent, so they are separate functions here and a model names the pair it was trained with.

Tables are computed in float32 and cast to the model's dtype at the end, as the reference implementations do; rounding the
frequencies themselves to bfloat16 gives wrong angles at long positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Segment = int | tuple[int, int]
"""A run of so many text tokens, or one picture's grid (rows, columns) of visual tokens."""

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`rotation(x, cos, sin)`: turn the features of x (..., head_dim) by the angles of broadcastable tables (..., head_dim)."""


def inverse_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """The head_dim / 2 rotary frequencies theta^(-2j / head_dim), float32 (RoFormer, arXiv:2104.09864, section 3.2.2)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / (theta**exponents)


def interleaved_axes(sections: Sequence[int]) -> list[int]:
    """The axis of each frequency where axes alternate: 0, 1, 2, 0, 1, 2, ... while an axis has frequencies left, then axis 0.

    Axis a > 0 takes every len(sections)-th frequency starting at a, `sections[a]` times or until there are no more; axis 0
    takes the rest (Qwen3-VL).
    """
    axes = [0] * sum(sections)
    for axis in range(1, len(sections)):
        for index in range(axis, min(sections[axis] * len(sections), len(axes)), len(sections)):
            axes[index] = axis
    return axes


def contiguous_axes(sections: Sequence[int]) -> list[int]:
    """The axis of each frequency where each axis has one block of neighbouring frequencies (GLM-OCR)."""
    return [axis for axis, size in enumerate(sections) for _ in range(size)]


def rotary_positions(segments: Sequence[Segment]) -> tuple[Tensor, int]:
    """M-RoPE positions (time, height, width) of a prompt, int64 (3, length), and the position of the token after it.

    Text counts up on all axes together. A picture that begins at position p has p, p + row and p + column, and what follows
    begins at p + max(rows, columns). The same numbers as `get_rope_index` of transformers' models of the Qwen2-VL line.
    """
    base = 0
    parts = []
    for segment in segments:
        if isinstance(segment, int):
            parts.append((base + torch.arange(segment)).expand(3, -1))
            base += segment
        else:
            rows, columns = segment
            row = torch.arange(rows).repeat_interleave(columns)
            column = torch.arange(columns).repeat(rows)
            parts.append(base + torch.stack((torch.zeros_like(row), row, column)))
            base += max(rows, columns)
    return torch.cat(parts, dim=1), base


def rotary_angles(positions: Tensor, frequencies: Tensor, axes: Sequence[int]) -> Tensor:
    """The angle of every frequency at every position: float32 (length, head_dim / 2).

    `positions` is int64 (axes, length); `axes[j]` is the row of it that frequency j follows.
    """
    rows = torch.as_tensor(axes, device=positions.device)
    return positions.index_select(0, rows).T.to(torch.float32) * frequencies


def half_split_table(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, head_dim), for `rotate_half_split`: features j and j + head_dim / 2 share angle j."""
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


def pairwise_table(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, head_dim), for `rotate_pairwise`: features 2j and 2j + 1 share angle j."""
    doubled = angles.repeat_interleave(2, dim=-1)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn features j and j + head_dim / 2 together (GPT-NeoX style; Qwen3-VL's text decoder)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def rotate_pairwise(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn features 2j and 2j + 1 together (GPT-J style; GLM-OCR's text decoder)."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def scalar_table(
    length: int,
    frequencies: Tensor,
    table: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, head_dim), for scalar positions 0 .. length - 1.

    Generated tokens have equal positions on all axes, so the section layout does not matter and decode looks its rows up here.
    """
    positions = torch.arange(length, dtype=torch.float32, device=frequencies.device)
    return table(torch.outer(positions, frequencies), dtype)
