"""How a quantized weight is kept on a device, and the product with it: one class per layout.

The seam: `linear.QuantizedLinear` hands over rows of codes and rows of activations; what the bytes look like in between is known
here and in the kernel that reads them. All layouts compute the same formula (see `scheme`) up to rounding:

* `plain`: two codes to a byte as they are stored, made full again for every product. Slow, and right everywhere.
* `aten`: torch's own 4-bit product. Activations are not rounded.
* `own`: the kernels of `kaminari_core.kernels`, on CPUs that they know.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaminari_core.errors import UsageError
from kaminari_core.quantization.scheme import Codes, Scheme, pack_nibbles, unpack_nibbles

LayoutName = Literal["auto", "own", "aten", "plain"]


class Layout(nn.Module):
    """The weight (N, K) of one layer. Rows arrive by `place`, each once; `finish` is called behind the last."""

    def __init__(self, rows: int, columns: int, scheme: Scheme) -> None:
        super().__init__()
        self.rows, self.columns, self.scheme = rows, columns, scheme

    def place(self, first_row: int, codes: Codes) -> None:
        """Take rows [first_row, first_row + n)."""
        raise NotImplementedError

    def finish(self) -> None:
        """Every row is there."""

    def forward(self, x: Tensor) -> Tensor:
        """(M, K) of bfloat16 or float32 to (M, N) of the same dtype."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """The weight (N, K), float32."""
        raise NotImplementedError


class PlainLayout(Layout):
    """The stored form itself."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, rows: int, columns: int, scheme: Scheme, device: torch.device) -> None:
        super().__init__(rows, columns, scheme)
        groups = columns // scheme.group
        width = columns // 2 if scheme.bits == 4 else columns
        self.register_buffer("codes", torch.empty(rows, width, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(rows, groups, dtype=torch.float32, device=device))
        self.register_buffer("zeros", torch.empty(rows, groups, dtype=torch.uint8, device=device))

    def place(self, first_row: int, codes: Codes) -> None:
        """See Layout."""
        rows = slice(first_row, first_row + len(codes.codes))
        self.codes[rows] = pack_nibbles(codes.codes) if self.scheme.bits == 4 else codes.codes
        self.scales[rows] = codes.scales
        self.zeros[rows] = codes.zeros

    def forward(self, x: Tensor) -> Tensor:
        """See Layout."""
        return F.linear(x, self._weight(x.dtype))

    def dequantized(self) -> Tensor:
        """See Layout."""
        return self._weight(torch.float32)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        codes = unpack_nibbles(self.codes) if self.scheme.bits == 4 else self.codes
        grouped = codes.view(self.rows, -1, self.scheme.group).to(torch.float32)
        return ((grouped - self.zeros[..., None]) * self.scales[..., None]).view(self.rows, self.columns).to(dtype)


def make_layout(
    name: LayoutName, rows: int, columns: int, scheme: Scheme, device: torch.device, dtype: torch.dtype
) -> Layout:
    """The named layout for a weight (rows, columns), or for `auto` the quickest that serves it. Raises UsageError."""
    if name in ("auto", "plain"):
        return PlainLayout(rows, columns, scheme, device)
    raise UsageError(f"the layout is {name!r}, which does not serve {scheme.bits}-bit weights on {device}; choose auto")
