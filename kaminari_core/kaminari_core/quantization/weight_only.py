"""The quantizers `int4` and `int8`: weights alone, in groups along the input, each with a scale and a whole-number zero point.

Rounding to nearest spends the levels of a group on its whole range; a few outliers then cost all others precision. The search
tries narrower ranges and moves each scale to its least-squares optimum for the codes at hand, in turns, and keeps whatever had
the least squared error: never more than rounding to nearest. With inputs from real pages, the error of a column weighs as
much as that input is large (the observation of AWQ, arXiv:2306.00978, used to choose scales instead of rescaling channels), and
the codes are then rounded one column after the other, so that later ones make up for the errors of earlier ones (GPTQ,
arXiv:2210.17323). All three give the same stored form, so they cost the same at run time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kaminari_core.protocols import ScaleSearch
from kaminari_core.quantization.scheme import Codes, Scheme, encode, quantize, stored_scales

_BLOCK = 1 << 20
"""Weights that are searched at a time: few enough that the passes over them stay in the processor's cache."""
_SHRINKS = {4: (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.65, 0.6), 8: (1.0, 0.98, 0.96)}
_REFINEMENTS = 2
_DAMPING = 0.01


class WeightOnly:
    """A quantizer of `bits` bits: `kaminari_core.protocols.Quantizer`."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def quantize(self, weight: Tensor, scheme: Scheme, search: ScaleSearch, inputs: Tensor | None) -> Codes:
        """See protocols.Quantizer."""
        assert (search == "activation") == (inputs is not None), "inputs belong to the search by activation"
        if search == "rtn":
            return quantize(weight, scheme)
        importance = None if inputs is None else inputs.square().mean(0)
        rows = max(1, _BLOCK // weight.shape[1])
        found = [search_scales(block, scheme, importance) for block in torch.split(weight, rows)]
        codes = Codes(*(torch.cat([getattr(one, part) for one in found]) for part in ("codes", "scales", "zeros")))
        return codes if inputs is None else round_with_feedback(weight, codes, scheme, inputs)


def int4() -> WeightOnly:
    """The quantizer `int4`."""
    return WeightOnly(4)


def int8() -> WeightOnly:
    """The quantizer `int8`."""
    return WeightOnly(8)


def search_scales(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Codes:
    """Codes for `weight` (N, K) with the least squared error found, its columns weighed by `importance` (K) if given."""
    rows, columns = weight.shape
    grouped = weight.to(torch.float32).view(rows, -1, scheme.group)
    weights = torch.ones(columns) if importance is None else importance.to(torch.float32)
    # A channel that was never active on the calibration pages must not be free to go wrong.
    weights = (weights + 1e-4 * weights.mean() + torch.finfo(torch.float32).tiny).view(-1, scheme.group)
    best = _Best(grouped, weights, scheme)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    for shrink in _SHRINKS[scheme.bits]:
        scales = stored_scales((high - low) * shrink / scheme.levels)
        zeros = torch.round(-low * shrink / scales).clamp(0, scheme.levels)
        best.offer(scales, zeros)
    for _ in range(_REFINEMENTS):
        best.refine()
    return encode(weight, best.scales, best.zeros, scheme)


def round_with_feedback(weight: Tensor, codes: Codes, scheme: Scheme, inputs: Tensor) -> Codes:
    """Other codes for the same scales and zero points: rounded column by column, each one's error made up for by the later ones.

    With H = X^T X / samples of the inputs X, and U the upper Cholesky factor of its inverse, rounding column k to q leaves the
    error e = (w_k - q) / U[k, k], and the columns j > k become w_j - e U[k, j] (GPTQ, arXiv:2210.17323, algorithm 1). H of fewer
    samples than columns is made regular by a part of its mean diagonal.
    """
    rows, columns = weight.shape
    hessian = inputs.T @ inputs / len(inputs)
    hessian.diagonal().add_(_DAMPING * hessian.diagonal().mean().clamp(min=1e-12))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    left = weight.to(torch.float32).clone()
    rounded = torch.empty(rows, columns)
    for start in range(0, columns, scheme.group):
        stop = start + scheme.group
        scale, zero = codes.scales[:, start // scheme.group], codes.zeros[:, start // scheme.group].to(torch.float32)
        errors = torch.empty(rows, scheme.group)
        for k in range(start, stop):
            rounded[:, k] = (torch.round(left[:, k] / scale) + zero).clamp(0, scheme.levels)
            errors[:, k - start] = (left[:, k] - (rounded[:, k] - zero) * scale) / upper[k, k]
            left[:, k + 1 : stop] -= errors[:, k - start, None] * upper[k, k + 1 : stop]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return Codes(rounded.to(torch.uint8), codes.scales, codes.zeros)


class _Best:
    """The scale and zero point of each group with the least error so far."""

    def __init__(self, grouped: Tensor, weights: Tensor, scheme: Scheme) -> None:
        self._grouped, self._weights, self._scheme = grouped, weights, scheme
        self._error = torch.full(grouped.shape[:2], torch.inf)
        self.scales, self.zeros = torch.ones(grouped.shape[:2]), torch.zeros(grouped.shape[:2])

    def offer(self, scales: Tensor, zeros: Tensor) -> None:
        """Take these where they are better."""
        error = self._grouped - self._offsets(scales, zeros) * scales[..., None]
        error = error.square_().mul_(self._weights).sum(-1)
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        self.scales = torch.where(better, scales, self.scales)
        self.zeros = torch.where(better, zeros, self.zeros)

    def refine(self) -> None:
        """Offer the scales that are optimal for the codes of the best, and the zero points on both sides of its own."""
        zeros = self.zeros
        for step in (0, -1, 1):
            moved = (zeros + step).clamp(0, self._scheme.levels)
            offsets = self._offsets(self.scales, moved)
            weighed = offsets * self._weights
            optimal = (weighed * self._grouped).sum(-1) / (weighed * offsets).sum(-1)
            self.offer(stored_scales(torch.nan_to_num(optimal, posinf=0.0, neginf=0.0)), moved)

    def _offsets(self, scales: Tensor, zeros: Tensor) -> Tensor:
        """Codes minus zero points, for the whole group."""
        offsets = torch.round(self._grouped / scales[..., None])
        return torch.clamp(offsets, min=-zeros[..., None], max=self._scheme.levels - zeros[..., None])
