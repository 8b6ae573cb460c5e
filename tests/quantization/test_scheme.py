"""The formula of the stored form, held to arithmetic."""

from __future__ import annotations

import pytest
import torch

from kaminari_core.quantization.scheme import (
    Codes,
    Scheme,
    encode,
    pack_nibbles,
    quantize,
    stored_scales,
    unpack_nibbles,
)


def test_the_weight_is_code_minus_zero_times_scale() -> None:
    codes = Codes(
        torch.tensor([[0, 15, 7, 8]], dtype=torch.uint8),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([[8, 7]], dtype=torch.uint8),
    )
    assert codes.group == 2
    assert codes.dequantize().tolist() == [[-4.0, 3.5, 0.0, 2.0]]
    assert codes.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_the_low_half_of_a_byte_is_the_even_column() -> None:
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_nearest_is_off_by_half_a_level_at_most(bits: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(bits * group)
    weight = torch.randn(7, 256).to(dtype)
    codes = quantize(weight, Scheme(bits, group))
    assert codes.scales.shape == (7, 256 // group)
    error = (codes.dequantize() - weight.float()).abs().view(7, -1, group).amax(-1)
    # The scale is rounded to bfloat16, which may leave the ends of the range out by 2^-8 of it; the zero point by half a level.
    assert bool((error <= codes.scales * (1 + (1 << bits) * 2**-8)).all())
    inner = (codes.codes > 0) & (codes.codes < (1 << bits) - 1)
    halves = codes.scales.repeat_interleave(group, 1) / 2
    assert bool(((codes.dequantize() - weight.float()).abs() <= halves * (1 + 1e-5))[inner].all())
    assert torch.equal(codes.scales, codes.scales.to(torch.bfloat16).float())


def test_zeros_stay_zero_and_an_empty_group_is_all_zero() -> None:
    weight = torch.zeros(2, 64)
    weight[0, :32] = torch.linspace(-1, 3, 32)
    weight[0, 5] = 0.0
    restored = quantize(weight, Scheme(4, 32)).dequantize()
    assert restored[0, 5] == 0
    assert not restored[0, 32:].any()
    assert not restored[1].any()


def test_one_sided_groups_use_all_levels() -> None:
    codes = quantize(torch.linspace(1, 15, 32)[None], Scheme(4, 32))
    assert codes.zeros.tolist() == [[0]]
    assert codes.codes.amax() == 15
    assert quantize(-torch.linspace(1, 15, 32)[None], Scheme(4, 32)).zeros.tolist() == [[15]]


def test_what_was_encoded_is_encoded_to_itself() -> None:
    torch.manual_seed(0)
    codes = quantize(torch.randn(3, 128), Scheme(4, 64))
    again = encode(codes.dequantize(), codes.scales, codes.zeros, Scheme(4, 64))
    assert torch.equal(again.codes, codes.codes)


@pytest.mark.parametrize(
    ("group", "columns", "fitting"),
    [(64, 384, 64), (64, 160, 32), (128, 192, 64), (64, 96, 32), (64, 48, None), (32, 48, None)],
)
def test_a_group_that_does_not_divide_is_halved(group: int, columns: int, fitting: int | None) -> None:
    found = Scheme(4, group).for_columns(columns)
    assert (found.group if found else None) == fitting


def test_stored_scales_are_never_zero() -> None:
    assert stored_scales(torch.tensor([0.0, 1e-45, 0.3])).tolist() == pytest.approx([1.0, 1.0, 0.30078125])
