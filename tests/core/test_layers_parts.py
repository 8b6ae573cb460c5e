"""Decoder parts against formulas written out plainly."""

from __future__ import annotations

import pytest
import torch

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.flow import Embedded
from kaminari_core.layer_call import run_layer
from kaminari_core.protocols import Step
from kaminari_core.rope import (
    contiguous_axes,
    half_split_table,
    interleaved_axes,
    inverse_frequencies,
    pairwise_table,
    rotary_angles,
    rotate_half_split,
    rotate_pairwise,
    scalar_table,
)
from kaminari_core.testing import TinyModel


def test_interleaved_axes_of_the_published_sections() -> None:
    """Sections 24, 20, 20: height at j % 3 == 1 and width at j % 3 == 2 below 60, time elsewhere."""
    expected = [(1 if j % 3 == 1 else 2 if j % 3 == 2 else 0) if j < 60 else 0 for j in range(64)]
    assert interleaved_axes((24, 20, 20)) == expected


def test_contiguous_axes_of_the_published_sections() -> None:
    assert contiguous_axes((16, 24, 24)) == [0] * 16 + [1] * 24 + [2] * 24


@pytest.mark.parametrize(
    ("rotate", "table", "pair"),
    [
        (rotate_half_split, half_split_table, lambda j: (j, j + 4)),
        (rotate_pairwise, pairwise_table, lambda j: (2 * j, 2 * j + 1)),
    ],
)
def test_rotation_is_a_complex_product(rotate, table, pair) -> None:  # type: ignore[no-untyped-def]
    """Each pair of features, read as a complex number, is multiplied by exp(i * position * frequency)."""
    frequencies = inverse_frequencies(8, 100.0)
    positions = torch.tensor([[0, 3, 7]])
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *table(rotary_angles(positions, frequencies, [0] * 4), torch.float32))
    for row, position in enumerate((0, 3, 7)):
        for j in range(4):
            real, imaginary = pair(j)
            angle = torch.tensor(position / 100.0 ** (2 * j / 8))
            expected = torch.complex(x[row, real], x[row, imaginary]) * torch.complex(angle.cos(), angle.sin())
            got = torch.complex(turned[row, real], turned[row, imaginary])
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_scalar_table_equals_positions_with_equal_axes() -> None:
    frequencies = inverse_frequencies(32, 5e6)
    cos, sin = scalar_table(40, frequencies, half_split_table, torch.float32)
    positions = torch.tensor([[0, 5, 39]] * 3)
    angles = rotary_angles(positions, frequencies, interleaved_axes((6, 5, 5)))
    expected_cos, expected_sin = half_split_table(angles, torch.float32)
    torch.testing.assert_close(cos[[0, 5, 39]], expected_cos)
    torch.testing.assert_close(sin[[0, 5, 39]], expected_sin)


def _embedded(model: TinyModel, ids: torch.Tensor) -> Embedded:
    return Embedded(model.decoder.embed_tokens(ids), torch.arange(len(ids))[None])


@pytest.fixture
def model() -> TinyModel:
    return TinyModel(EngineConfig(max_length=128))


def _cache(model: TinyModel, slots: int) -> StaticCache:
    return StaticCache(model.shape, slots, 128, model.device, model.dtype)


@torch.inference_mode()
def test_prefill_equals_attention_written_out(model: TinyModel) -> None:
    """One layer's prefill against softmax(q k / sqrt(d)) v with repeated keys and a causal mask."""
    attention = model.decoder.layers[0].attention
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    cos, sin = half_split_table(
        rotary_angles(torch.arange(9)[None], inverse_frequencies(32, 1e4), [0] * 16), torch.float32
    )
    keys, values = torch.zeros(2, 129, 32), torch.zeros(2, 129, 32)
    got = attention.prefill(hidden, cos, sin, keys, values, 0)
    q, k, v = (hidden @ attention.qkv_proj.weight.T).split((128, 64, 64), dim=-1)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, 32)).transpose(0, 1)
        return rotate_half_split(heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight, cos, sin)

    q, k = normed(q, attention.q_norm.weight), normed(k, attention.k_norm.weight).repeat_interleave(2, dim=0)
    v = v.unflatten(-1, (2, 32)).transpose(0, 1).repeat_interleave(2, dim=0)
    scores = (q @ k.transpose(1, 2)) / 32**0.5 + torch.full((9, 9), float("-inf")).triu(1)
    expected = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ attention.o_proj.weight.T
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 4, 7, 50])
def test_chunked_prefill_equals_whole(model: TinyModel, chunk: int) -> None:
    ids = torch.randint(0, 256, (50,), generator=torch.Generator().manual_seed(2))
    whole, parts = _cache(model, 1), _cache(model, 1)
    expected = model.prefill(_embedded(model, ids), 0, 50, whole, 0)
    for start in range(0, 50, chunk):
        got = model.prefill(_embedded(model, ids), start, min(start + chunk, 50), parts, 0)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts.keys, whole.keys, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 3])
def test_decode_equals_prefill_of_the_longer_prompt(model: TinyModel, width: int) -> None:
    """Three rows of different lengths, `width` new tokens each, against recomputing every prefix from nothing."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (size,), generator=generator) for size in (5, 40, 17)]
    fresh = torch.randint(0, 256, (3, width), generator=generator)
    cache = _cache(model, 4)
    for slot, ids in enumerate(prompts):
        model.prefill(_embedded(model, ids), 0, len(ids), cache, slot)
    cursors = torch.tensor([[len(ids) + offset for offset in range(width)] for ids in prompts])
    logits = model.decode(Step(fresh, cursors, cursors, 64), cache, run_layer)
    for row, ids in enumerate(prompts):
        for offset in range(width):
            longer = torch.cat((ids, fresh[row, : offset + 1]))
            expected = model.prefill(_embedded(model, longer), 0, len(longer), _cache(model, 1), 0)
            torch.testing.assert_close(logits[row, offset], expected, atol=1e-3, rtol=1e-3)
