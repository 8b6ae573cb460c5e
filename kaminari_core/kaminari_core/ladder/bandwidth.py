"""How much memory a decode step has to read, and how fast this machine reads memory right now.

One row of decoding is bound by the bytes it reads, so the share of the bandwidth that a step reaches says how much is left
to be gained. The bandwidth changes with the neighbours and with the size of pages, so it is measured in the same run, between
the rungs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kaminari_core.protocols import Model

BUFFER_BYTES = 512 << 20
"""Several times the largest last-level cache."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class ReadBandwidth:
    """Measures reading a large buffer with all of torch's threads; the best of two reductions, which differ by machine."""

    def __init__(self, device: torch.device, size: int = BUFFER_BYTES) -> None:
        self._buffer = torch.ones(size // 4, dtype=torch.float32, device=device)

    def measure(self, repeats: int = 3) -> float:
        """Bytes per second, the best of `repeats` passes."""
        return max(self._pass(wide) for _ in range(repeats) for wide in (False, True))

    def _pass(self, wide: bool) -> float:
        started = time.perf_counter()
        # `item` waits for the device.
        (self._buffer.view(torch.int64).sum() if wide else self._buffer.amax()).item()
        return self._buffer.nbytes / (time.perf_counter() - started)


def step_bytes(model: Model, rows: int, live: int) -> int | None:
    """Bytes that a decode step of `rows` rows reads: repeated layers, head, and keys and values of `live` positions per row.

    None for a model without a module called `lm_head`, whose head cannot be counted. Activations and the rows of the embedding
    table that are looked up are left out: they are below a thousandth.
    """
    networks = [value for value in vars(model).values() if isinstance(value, nn.Module)]
    heads = [head for network in networks for name, head in network.named_modules() if name.endswith("lm_head")]
    if len(heads) != 1:
        return None
    shape = model.shape
    layers = [
        stack
        for network in networks
        for name, stack in network.named_modules()
        if isinstance(stack, nn.ModuleList) and len(stack) == shape.layers and name.endswith("layers")
    ]
    if len(layers) != 1:
        return None
    per_position = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    return held_bytes(layers[0]) + held_bytes(heads[0]) + rows * live * per_position


def held_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, each storage counted once."""
    tensors: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        tensors[tensor.data_ptr()] = tensor
    return sum(tensor.nbytes for tensor in tensors.values())


def pages() -> dict[str, Any]:
    """What memory pages figures were taken with: the system's setting for huge pages, and whether torch asks for them."""
    setting = HUGE_PAGES.read_text(encoding="ascii") if HUGE_PAGES.exists() else "[unknown]"
    return {
        "transparent_huge_pages": setting[setting.index("[") + 1 : setting.index("]")],
        "torch_asks": os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
    }
