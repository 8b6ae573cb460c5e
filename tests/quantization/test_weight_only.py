"""The searches for scales: what each promises of the error it keeps small."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kaminari_core.quantization.scheme import Codes, Scheme
from kaminari_core.quantization.weight_only import int4, int8, search_scales


def squared(codes: Codes, weight: Tensor) -> Tensor:
    """The squared error of each group."""
    return (codes.dequantize() - weight).square().view(len(weight), -1, codes.group).sum(-1)


@pytest.fixture(scope="module")
def weight() -> Tensor:
    """Heavy tails, as trained weights have them; one empty group and one group of a single value."""
    torch.manual_seed(1)
    made = torch.randn(48, 256) * torch.randn(48, 256).abs()
    made[0, :64] = 0
    made[1, :64] = 0.25
    return made


@pytest.mark.parametrize("bits", [4, 8])
def test_the_search_is_never_worse_than_rounding_to_nearest(weight: Tensor, bits: int) -> None:
    quantizer, scheme = (int4() if bits == 4 else int8()), Scheme(bits, 64)
    nearest = squared(quantizer.quantize(weight, scheme, "rtn", None), weight)
    searched = squared(quantizer.quantize(weight, scheme, "mse", None), weight)
    assert bool((searched <= nearest + 1e-9).all())
    if bits == 4:
        assert float(searched.sum()) < 0.95 * float(nearest.sum())


def test_the_search_comes_close_to_the_best_of_a_fine_grid() -> None:
    torch.manual_seed(2)
    weight, scheme = torch.randn(16, 32), Scheme(4, 32)
    found = squared(search_scales(weight, scheme), weight)[:, 0]
    best = torch.full((16,), torch.inf)
    for scale in torch.linspace(0.1, 0.6, 251):
        for zero in range(16):
            offsets = torch.round(weight / scale).clamp(-zero, 15 - zero)
            best = torch.minimum(best, (weight - offsets * scale).square().sum(-1))
    assert float((found / best).mean()) < 1.06


def test_pieces_of_a_weight_are_quantized_as_the_whole(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = int4().quantize(weight, Scheme(4, 64), "mse", None)
    monkeypatch.setattr("kaminari_core.quantization.weight_only._BLOCK", 5 * 256)
    pieces = int4().quantize(weight, Scheme(4, 64), "mse", None)
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(whole.scales, pieces.scales)
    assert torch.equal(whole.zeros, pieces.zeros)


def outputs(columns: int, samples: int) -> Tensor:
    """Correlated inputs of very different sizes."""
    torch.manual_seed(3)
    mixed = torch.randn(samples, columns // 8) @ torch.randn(columns // 8, columns) + 0.3 * torch.randn(
        samples, columns
    )
    return mixed * torch.logspace(-1, 1, columns)[torch.randperm(columns)]


@pytest.mark.parametrize("samples", [1000, 60], ids=["many inputs", "fewer than columns"])
def test_inputs_make_the_error_of_the_output_smaller(weight: Tensor, samples: int) -> None:
    inputs = outputs(256, 1600)
    seen, unseen = inputs[:samples], inputs[1000:]

    def error(codes: Codes) -> float:
        return float((unseen @ (codes.dequantize() - weight).T).norm() / (unseen @ weight.T).norm())

    plain = error(int4().quantize(weight, Scheme(4, 64), "mse", None))
    aware = error(int4().quantize(weight, Scheme(4, 64), "activation", seen))
    assert aware < (0.5 if samples == 1000 else 0.8) * plain


def test_a_channel_that_was_never_active_is_quantized_all_the_same(weight: Tensor) -> None:
    inputs = outputs(256, 500)
    inputs[:, 100:140] = 0
    codes = int4().quantize(weight, Scheme(4, 64), "activation", inputs)
    off = (codes.dequantize() - weight)[:, 100:140].norm() / weight[:, 100:140].norm()
    assert float(off) < 0.4
    nothing = int4().quantize(weight, Scheme(4, 64), "activation", torch.zeros(10, 256))
    assert bool(nothing.scales.isfinite().all())
    assert float((nothing.dequantize() - weight).norm() / weight.norm()) < 0.2
