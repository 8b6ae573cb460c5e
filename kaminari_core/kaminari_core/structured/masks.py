"""Which tokens the rows of one step may take, on the device. Rows without a constraint cost nothing here.

Masks are written by the grammars as bits into one pinned buffer while the device still computes the step, and travel in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kaminari_core.structured.constraint import Constraint


class Masks:
    """The buffers of one engine, allocated when the first constrained row comes. Belongs to the engine thread."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._rows, self._vocabulary, self._device = rows, vocabulary, device
        self._staging: Tensor | None = None
        self._bits: Tensor | None = None
        self.copies = 0
        """Copies to the device so far: one for each step with a constrained row."""

    def write(self, constraint: Constraint, guess: Sequence[int], used: int) -> int:
        """Write the masks of a row behind the `used` ones of this step; returns how many there are now.

        Raises EngineError, see `Constraint.mask`.
        """
        if self._staging is None:
            # One bit more than tokens, see `vocabulary.TokenTable`.
            words = self._vocabulary // 32 + 1
            pinned = self._device.type == "cuda"
            self._staging = torch.zeros((self._rows, words), dtype=torch.int32, pin_memory=pinned)
            self._bits = (2 ** torch.arange(8)).to(self._device, torch.uint8)
        stop = used + len(guess) + 1
        constraint.mask(guess, self._staging[used:stop])
        return stop

    def forbidden(self, used: int) -> Tensor:
        """Where the first `used` masks of this step forbid a token: bool (used, vocabulary) on the device."""
        assert self._staging is not None and self._bits is not None, "masks are written before they are read"
        self.copies += 1
        # The rows of the step are read back before the next one is begun, so the buffer is not written while it is copied.
        octets = self._staging[:used].to(self._device, non_blocking=True).view(torch.uint8)
        return (octets[..., None] & self._bits == 0).flatten(1)[:, : self._vocabulary]
