"""A linear layer whose weight is codes of 4 or 8 bits: the module that a loader fills and a model calls.

The seam: the loader knows files and streams `Codes` by ranges of rows; this module knows in which layout the device wants them.
A layout (`layouts`) is chosen when the first rows arrive, because only then the device is known, and the rows go straight to
their place in it, so that a load takes the packed size and little more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kaminari_core.quantization.layouts import Layout, LayoutName, make_layout
from kaminari_core.quantization.scheme import Codes, Scheme


class QuantizedLinear(nn.Module):
    """`F.linear` with a quantized weight (N out, K in). Made on meta or anywhere; it holds no weight until `place` is called.

    `layout` names how the weight is kept and multiplied: `own` (the kernels of this package), `aten` (those of torch), `plain`
    (made full again in every call), or `auto`, the first of these that serves the scheme on the device.
    """

    def __init__(
        self, in_features: int, out_features: int, scheme: Scheme, bias: bool = False, *, layout: LayoutName = "auto"
    ) -> None:
        super().__init__()
        assert scheme.fits(in_features), f"groups of {scheme.group} do not divide {in_features} columns"
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.wanted = layout
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.layout: Layout | None = None
        self._placed = 0

    @property
    def complete(self) -> bool:
        """Whether every row has been placed."""
        return self._placed == self.out_features

    def place(self, first_row: int, codes: Codes, device: torch.device, dtype: torch.dtype) -> None:
        """Take the codes of rows [first_row, first_row + n), each row exactly once, in any order; on any device.

        `device` is where the layer will compute, `dtype` what its activations will be: bfloat16 or float32.
        """
        rows, columns = codes.codes.shape
        assert columns == self.in_features and codes.group == self.scheme.group, "codes of another shape or scheme"
        assert 0 <= first_row <= self.out_features - rows, "rows that the layer does not have"
        if self.layout is None:
            self.layout = make_layout(self.wanted, self.out_features, self.in_features, self.scheme, device, dtype)
        self.layout.place(first_row, codes)
        self._placed += rows
        if self.complete:
            self.layout.finish()

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N), in the dtype of x."""
        assert self.layout is not None, "no weight was placed"
        out: Tensor = self.layout(x.reshape(-1, self.in_features))
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def dequantized(self) -> Tensor:
        """The weight (N, K) that the layer computes with, float32."""
        assert self.layout is not None, "no weight was placed"
        return self.layout.dequantized()

    def extra_repr(self) -> str:
        """Shape and scheme, for printed modules."""
        bits, group = self.scheme.bits, self.scheme.group
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={bits}, group={group}"
