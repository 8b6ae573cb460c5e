"""How a quantized weight is kept on a device, and the product with it: one class per layout.

The seam: `linear.QuantizedLinear` hands over rows of codes and rows of activations; what the bytes look like in between is known
here and in the kernel that reads them. All layouts compute the same formula (see `scheme`) up to rounding:

* `own`: the kernels of `kaminari_core.kernels`, on CPUs that they know. Activations are rounded to 8 or 16 bits.
* `aten`: torch's own 4-bit product, on CPUs and on CUDA. Activations are not rounded.
* `plain`: two codes to a byte as they are stored, made full again for every product. Slow, and right everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaminari_core.kernels import library, operators
from kaminari_core.quantization.scheme import Codes, Scheme, pack_nibbles, unpack_nibbles

LayoutName = Literal["auto", "own", "aten", "plain"]

_ATEN_ROWS = 64
"""Rows of a tile of torch's CPU layout: a weight may be packed in parts of whole tiles."""
_FULL_FROM = 64
"""From so many rows of activations on, making the weight full once is cheaper than 16-bit activations."""
_FULL_BYTES = 8 * 2**20
"""Of the weight so much is made full at a time, in a buffer that stays in the processor's cache."""

_PLAIN_ELEMENTS = 16 * 2**20
"""Of a weight without a product of its own so much is made full at a time: a whole output head would take gigabytes."""


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
        step = max(1, _PLAIN_ELEMENTS // self.columns)
        if step >= self.rows:
            return F.linear(x, self._weight(0, self.rows, x.dtype))
        parts = [F.linear(x, self._weight(first, first + step, x.dtype)) for first in range(0, self.rows, step)]
        return torch.cat(parts, dim=-1)

    def dequantized(self) -> Tensor:
        """See Layout."""
        return self._weight(0, self.rows, torch.float32)

    def _weight(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        rows = slice(start, stop)
        codes = unpack_nibbles(self.codes[rows]) if self.scheme.bits == 4 else self.codes[rows]
        grouped = codes.view(len(codes), -1, self.scheme.group).to(torch.float32)
        full = (grouped - self.zeros[rows, :, None]) * self.scales[rows, :, None]
        return full.view(len(codes), self.columns).to(dtype)


class OwnLayout(Layout):
    """Panels of 16 rows, for the kernels; see kernels/csrc/kernels.h.

    `activation_bits` is what activations are rounded to, by row and group of columns: 8, or 16, which rounds less than bfloat16
    does. With one row of activations both cost the same; with many, 16 bits cost about twice as much.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, rows: int, columns: int, scheme: Scheme, activation_bits: int = 8) -> None:
        super().__init__(rows, columns, scheme)
        self.activation_bits = activation_bits
        padded = -(-rows // operators.PANEL) * operators.PANEL
        groups = columns // scheme.group
        codes = library.on_large_pages(torch.empty(padded * columns * scheme.bits // 8, dtype=torch.uint8))
        # Zeros: the last panel's rows that do not exist are computed, though never shown.
        self.register_buffer("codes", codes.zero_())
        self.register_buffer("scales", torch.zeros(padded * groups, dtype=torch.bfloat16))
        self.register_buffer("zeros", torch.zeros(padded * groups, dtype=torch.uint8))

    @staticmethod
    def serves(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernels are here and know such weights."""
        known = scheme.group in (32, 64, 128) and dtype in (torch.bfloat16, torch.float32)
        return device.type == "cpu" and known and library.loaded()

    def place(self, first_row: int, codes: Codes) -> None:
        """See Layout. Scales are kept in bfloat16, which those of `scheme.quantize` are."""
        levels, zeros = codes.codes.cpu().contiguous(), codes.zeros.cpu().contiguous()
        scales = codes.scales.to("cpu", torch.bfloat16).contiguous()
        scheme = self.scheme
        operators.pack_codes(
            levels, scales, zeros, first_row, scheme.group, scheme.bits, self.codes, self.scales, self.zeros
        )

    def forward(self, x: Tensor) -> Tensor:
        """See Layout."""
        if self.activation_bits == 16 and x.shape[0] >= _FULL_FROM and x.dtype == torch.bfloat16:
            return self._by_full_rows(x)
        return operators.linear_codes(
            x.contiguous(),
            self.codes,
            self.scales,
            self.zeros,
            self.rows,
            self.scheme.group,
            self.scheme.bits,
            self.activation_bits,
        )

    def dequantized(self) -> Tensor:
        """See Layout."""
        return self._full(0, torch.empty(self.rows, self.columns))

    def _by_full_rows(self, x: Tensor) -> Tensor:
        step = max(1, _FULL_BYTES // (self.columns * x.element_size() * operators.PANEL)) * operators.PANEL
        out = x.new_empty(x.shape[0], self.rows)
        buffer = x.new_empty(min(step, self.rows), self.columns)
        for first in range(0, self.rows, step):
            weight = self._full(first, buffer[: min(step, self.rows - first)])
            out[:, first : first + len(weight)] = F.linear(x, weight)
        return out

    def _full(self, first_row: int, out: Tensor) -> Tensor:
        """Rows from `first_row`, the first of a panel, on, as many as `out` has; written there and returned."""
        groups = self.columns // self.scheme.group
        width = self.columns * self.scheme.bits // 8
        padded = -(-len(out) // operators.PANEL) * operators.PANEL
        rows = slice(first_row, first_row + padded)
        codes = self.codes.view(-1, width)[rows].view(-1)
        scales = self.scales.view(-1, groups)[rows].view(-1)
        zeros = self.zeros.view(-1, groups)[rows].view(-1)
        operators.dequantize_codes(
            codes, scales, zeros, len(out), self.columns, self.scheme.group, self.scheme.bits, out
        )
        return out


class AtenLayout(Layout):
    """What `_weight_int4pack_mm` of torch wants, on a CPU or on CUDA: 4 bits, and a multiple of 16 rows.

    It knows (code - 8) * scale + offset, so the offset of a group is (8 - zero point) * scale.
    """

    codes: Tensor
    scales_and_offsets: Tensor

    def __init__(self, rows: int, columns: int, scheme: Scheme, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(rows, columns, scheme)
        self.on_card = device.type == "cuda"
        self.register_buffer("codes", torch.empty(rows, columns // 2, dtype=torch.uint8, device=device))
        offsets = torch.empty(columns // scheme.group, rows, 2, dtype=dtype, device=device)
        self.register_buffer("scales_and_offsets", offsets)

    @staticmethod
    def serves(rows: int, columns: int, scheme: Scheme, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether torch has a product for such weights."""
        if scheme.bits != 4 or scheme.group not in (32, 64, 128, 256):
            return False
        if device.type == "cuda":
            # Tiles of 8 rows and of 8 * 16 columns; Ampere and later.
            able = torch.cuda.get_device_capability(device) >= (8, 0)
            return able and dtype == torch.bfloat16 and rows % 8 == 0 and columns % 128 == 0
        return device.type == "cpu" and rows % 16 == 0 and dtype in (torch.bfloat16, torch.float32)

    def place(self, first_row: int, codes: Codes) -> None:
        """See Layout."""
        rows = slice(first_row, first_row + len(codes.codes))
        packed = pack_nibbles(codes.codes)
        # CUDA's packing has the even column in the high half of a byte.
        self.codes[rows] = (packed << 4) | (packed >> 4) if self.on_card else packed
        offsets = (8 - codes.zeros.to(torch.float32)) * codes.scales
        self.scales_and_offsets[:, rows] = (
            torch.stack((codes.scales, offsets), dim=-1).transpose(0, 1).to(self.scales_and_offsets)
        )

    def finish(self) -> None:
        """See Layout."""
        if self.on_card:
            self.codes = torch.ops.aten._convert_weight_to_int4pack(self.codes, 8)
            return
        for start in range(0, self.rows, 16 * _ATEN_ROWS):
            rows = slice(start, start + 16 * _ATEN_ROWS)
            whole = unpack_nibbles(self.codes[rows]).to(torch.int32)
            self.codes[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)

    def forward(self, x: Tensor) -> Tensor:
        """See Layout."""
        aten = torch.ops.aten
        product = aten._weight_int4pack_mm if self.on_card else aten._weight_int4pack_mm_for_cpu
        out: Tensor = product(x.contiguous(), self.codes, self.scheme.group, self.scales_and_offsets)
        return out

    def dequantized(self) -> Tensor:
        """See Layout. The product with the unit matrix, because nothing else reads the packed form."""
        unit = torch.eye(self.columns, dtype=self.scales_and_offsets.dtype, device=self.codes.device)
        return self.forward(unit).T.to(torch.float32)


def make_layout(
    name: LayoutName, rows: int, columns: int, scheme: Scheme, device: torch.device, dtype: torch.dtype
) -> Layout:
    """The named layout for a weight (rows, columns); where that does not serve it, the next in the order of this file's list."""
    if name in ("auto", "own") and OwnLayout.serves(scheme, device, dtype):
        return OwnLayout(rows, columns, scheme)
    if name != "plain" and AtenLayout.serves(rows, columns, scheme, device, dtype):
        return AtenLayout(rows, columns, scheme, device, dtype)
    return PlainLayout(rows, columns, scheme, device)
