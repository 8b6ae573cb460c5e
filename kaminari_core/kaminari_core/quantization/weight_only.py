"""The quantizers `int4` and `int8`: weights alone, in groups along the input, each with a scale and a whole-number zero point.

Rounding to nearest spends the levels of a group on its whole range; a few outliers then cost all others precision. The search
tries narrower ranges and moves each scale to its least-squares optimum for the codes at hand, in turns, and keeps whatever had
the least squared error: never more than rounding to nearest. Weighing the error of an input channel by how large that input is
on real pages is the observation of AWQ (arXiv:2306.00978), used here to choose scales instead of rescaling channels, so that the
stored form and the run time are the same for all three.
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


class WeightOnly:
    """A quantizer of `bits` bits: `kaminari_core.protocols.Quantizer`."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def quantize(self, weight: Tensor, scheme: Scheme, search: ScaleSearch, importance: Tensor | None) -> Codes:
        """See protocols.Quantizer."""
        assert (search == "activation") == (importance is not None), "importance belongs to the search by activation"
        if search == "rtn":
            return quantize(weight, scheme)
        rows = max(1, _BLOCK // weight.shape[1])
        found = [search_scales(block, scheme, importance) for block in torch.split(weight, rows)]
        return Codes(*(torch.cat([getattr(one, part) for one in found]) for part in ("codes", "scales", "zeros")))


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
