"""The static KV cache: two buffers allocated once, one row per slot, at fixed addresses.

Rows start at position 0 and each has its own length, kept by the loop; pad tokens never enter. Slots are handed out lowest
first and the loop moves the last live row into a hole, so live rows are always 0 .. n - 1 and a decode step reads a prefix view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kaminari_core.protocols import ModelShape


class StaticCache:
    """Keys and values, each (layers + draft layers, slots, kv_heads, max_length + 1, head_dim).

    The last position of a row is spare: decode rows without a request write there (see `protocols.Step`). `width` is the most
    tokens of one row in a step, for which a draft head's hidden states are kept.
    """

    def __init__(
        self,
        shape: ModelShape,
        slots: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        width: int = 1,
    ) -> None:
        size = (shape.layers + shape.draft_layers, slots, shape.kv_heads, max_length + 1, shape.head_dim)
        # Zeros, not empty: masked positions are multiplied by zero, and garbage may be not-a-number.
        self.keys: Tensor = torch.zeros(size, device=device, dtype=dtype)
        self.values: Tensor = torch.zeros(size, device=device, dtype=dtype)
        self.state: Tensor | None = None
        if shape.draft_layers:
            self.state = torch.zeros((slots, width, shape.hidden), device=device, dtype=dtype)
        self.slots = slots
        self.max_length = max_length
        self._taken = [False] * slots

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self._taken.count(False)

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return self.keys.nbytes + self.values.nbytes + (0 if self.state is None else self.state.nbytes)

    def claim(self) -> int:
        """Take the lowest free slot."""
        slot = self._taken.index(False)
        self._taken[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Its contents are left as they are and never read again."""
        assert self._taken[slot], f"slot {slot} is released but was not claimed"
        self._taken[slot] = False

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to the free slot `target`, claim that and release `source`."""
        assert self._taken[source] and not self._taken[target], f"cannot move slot {source} to {target}"
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        if self.state is not None:
            self.state[target] = self.state[source]
        self._taken[source], self._taken[target] = False, True
