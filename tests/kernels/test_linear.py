"""The products against the formula in float64, for odd shapes, all row counts, groups and instruction sets."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kaminari_core.kernels import operators
from kaminari_core.quantization.layouts import OwnLayout
from kaminari_core.quantization.scheme import Codes, Scheme, quantize

SHAPES = [(1, 128), (37, 256), (50, 384)]
ROWS = [*range(1, 17), 29]


def packed(codes: Codes, scheme: Scheme, activation_bits: int = 8, step: int = 37) -> OwnLayout:
    """The layout of the kernels, filled by pieces that end within panels."""
    rows, columns = codes.codes.shape
    layout = OwnLayout(rows, columns, scheme, activation_bits)
    for at in range(0, rows, step):
        part = slice(at, at + step)
        layout.place(at, Codes(codes.codes[part], codes.scales[part], codes.zeros[part]))
    return layout


def as_whole_numbers(x: torch.Tensor, group: int, largest: float) -> torch.Tensor:
    """Activations rounded to whole multiples of (largest magnitude of a row's group) / `largest`, float64."""
    grouped = x.view(len(x), -1, group)
    magnitude = grouped.abs().amax(-1, keepdim=True)
    # A number divided by a tensor would be its reciprocal times the number, rounded twice.
    factor = torch.full_like(magnitude, largest) / magnitude
    return (torch.round(grouped * factor).double() * (magnitude / largest)).view(len(x), -1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_products_with_codes_equal_the_formula(bits: int, group: int, instructions: str) -> None:
    generator = torch.Generator().manual_seed(bits + group)
    scheme = Scheme(bits, group)
    for (n, k), activation_bits in product(SHAPES, (8, 16)):
        codes = quantize(torch.randn(n, k, generator=generator) + 0.1, scheme)
        layout = packed(codes, scheme, activation_bits)
        x = torch.randn(max(ROWS), k, generator=generator)
        got = layout(x)
        # With the rounding of the activations taken over into the formula, what is left are sums of float32.
        rounded = as_whole_numbers(x, group, {8: 127.0, 16: 127.0 * 257}[activation_bits])
        expected = rounded @ codes.dequantize(torch.float64).T
        torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)
        # A row never depends on how many others there are.
        for m in ROWS:
            torch.testing.assert_close(layout(x[:m]), got[:m], atol=0, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_sixteen_bit_activations_lose_less_than_bfloat16(bits: int, instructions: str) -> None:
    generator = torch.Generator().manual_seed(1)
    scheme = Scheme(bits, 64)
    codes = quantize(torch.randn(48, 512, generator=generator), scheme)
    x = torch.randn(9, 512, generator=generator)
    exact = x.double() @ codes.dequantize(torch.float64).T

    def error(got: torch.Tensor) -> float:
        return float((got.double() - exact).norm() / exact.norm())

    in_bfloat16 = x.bfloat16().double() @ codes.dequantize(torch.float64).T
    assert error(packed(codes, scheme, 16)(x)) < error(in_bfloat16) / 10
    assert error(packed(codes, scheme, 8)(x)) < 0.01
    # bfloat16 in and out: rounding the result dominates.
    assert error(packed(codes, scheme, 16)(x.bfloat16()).float()) < 0.004


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_made_full_are_the_formula_exactly(bits: int, dtype: torch.dtype, instructions: str) -> None:
    for (n, k), group in product(SHAPES, (32, 64, 128)):
        scheme = Scheme(bits, group)
        codes = quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(n)), scheme)
        layout = packed(codes, scheme)
        out = torch.empty(n, k, dtype=dtype)
        operators.dequantize_codes(layout.codes, layout.scales, layout.zeros, n, k, group, bits, out)
        torch.testing.assert_close(out, codes.dequantize(dtype), atol=0, rtol=0)
        torch.testing.assert_close(layout.dequantized(), codes.dequantize(), atol=0, rtol=0)


def test_the_largest_codes_and_activations_do_not_overflow(instructions: str) -> None:
    """All codes and activations at their extremes, of both signs, where sums of 8 or 16 bits would saturate."""
    for bits, group, activation_bits in product((4, 8), (32, 128), (8, 16)):
        scheme = Scheme(bits, group)
        for code, zero in ((scheme.levels, 0), (0, scheme.levels)):
            whole = torch.full((17, 256), code, dtype=torch.uint8)
            parts = torch.full((17, 256 // group), zero, dtype=torch.uint8)
            codes = Codes(whole, torch.full(parts.shape, 0.5), parts)
            x = torch.ones(5, 256)
            x[1::2] = -1
            x[4, ::2] = -1
            got = packed(codes, scheme, activation_bits)(x)
            torch.testing.assert_close(
                got.double(), x.double() @ codes.dequantize(torch.float64).T, atol=1e-3, rtol=1e-5
            )


def test_what_is_not_finite_stays_so_and_rows_of_zeros_are_zero(instructions: str) -> None:
    scheme = Scheme(4, 64)
    layout = packed(quantize(torch.randn(20, 128), scheme), scheme)
    for activation_bits in (8, 16):
        layout.activation_bits = activation_bits
        x = torch.randn(5, 128)
        x[1, 70], x[2, 3], x[3] = float("nan"), float("-inf"), 0.0
        finite = torch.isfinite(layout(x))
        assert finite.all(dim=1).tolist() == [True, False, False, True, True]
        assert not finite[1:3].any()
        assert (layout(x)[3] == 0).all()
        tiny = torch.full((1, 128), 1e-45)
        assert torch.isfinite(layout(tiny)).all()


def test_few_rows_in_bfloat16_equal_the_formula(instructions: str) -> None:
    generator = torch.Generator().manual_seed(2)
    for n, k in ((1, 64), (7, 130), (50, 256), (33, 1024), (5, 7), (16, 32)):
        weight = torch.randn(n, k, generator=generator).bfloat16()
        x = torch.randn(18, k, generator=generator).bfloat16()
        got = operators.linear_bf16(x, weight)
        exact = x.double() @ weight.double().T
        torch.testing.assert_close(got.double(), exact, atol=0.05 if k > 500 else 0.02, rtol=0.01)
        assert (got.double() - exact).norm() / exact.norm() < 0.004
        for m in range(1, 18):
            torch.testing.assert_close(operators.linear_bf16(x[:m], weight), got[:m], atol=0, rtol=0)


@pytest.mark.usefixtures("kernels")
def test_what_does_not_go_together_is_an_error() -> None:
    scheme = Scheme(4, 64)
    layout = packed(quantize(torch.randn(20, 128), scheme), scheme)
    with pytest.raises(RuntimeError, match="codes must be contiguous and of"):
        layout(torch.randn(2, 64))
    with pytest.raises(RuntimeError, match="bfloat16 or float32"):
        layout(torch.randn(2, 128, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="activations have 64 columns, but the weight has 128"):
        operators.linear_bf16(torch.randn(2, 64).bfloat16(), torch.randn(9, 128).bfloat16())
    with pytest.raises(RuntimeError, match=r"rows 20 to 52 of 32"):
        layout.place(20, quantize(torch.randn(32, 128), scheme))
