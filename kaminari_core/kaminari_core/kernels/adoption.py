"""Puts the kernels into a model that has been loaded, and decides whether there are kernels at all.

The seam: a model package builds its network from `nn.Linear` and `kaminari_core.layers.Attention` and knows nothing of
processors. When an engine opens, `choose` says which implementation serves (compiling the kernels, if they are wanted and not
there yet), and `adopt` walks over the loaded network and exchanges the parts that have a quicker form here. One word names it:

* `own`: this package's kernels;
* `aten`: torch's, with its packed layout for 4-bit weights;
* `plain`: torch's ordinary operators alone.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaminari_core.config import Kernels
from kaminari_core.errors import UsageError
from kaminari_core.kernels import library, operators
from kaminari_core.layers import Attention
from kaminari_core.protocols import Model, Progress
from kaminari_core.quantization.layouts import OwnLayout

logger = logging.getLogger(__name__)

FEW_ROWS = 16
"""Up to so many rows a product is bound by the bytes of its weight, and the kernel for few rows is the quicker one."""
_LONGEST_HEAD = 256


class FewRowsLinear(nn.Linear):
    """A linear layer without bias in bfloat16 on a CPU: few rows go through the kernel, many through torch."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        if x.shape[:-1].numel() > FEW_ROWS:
            return F.linear(x, self.weight)
        out = operators.linear_bf16(x.reshape(-1, self.in_features).contiguous(), self.weight)
        return out.view(*x.shape[:-1], self.out_features)


def choose(wanted: Kernels, device: torch.device, progress: Progress) -> Kernels:
    """What `auto` means on this device, and whether what is wanted can be had; kernels that are chosen are loaded.

    Raises UsageError when `own` is wanted and there are none. Where `auto` finds none, the reason is logged.
    """
    if wanted in ("aten", "plain"):
        return wanted
    reason = f"they are for CPUs, and the device is {device}" if device.type != "cpu" else None
    if reason is None and wanted == "auto":
        reason = library.unsupported()
    try:
        if reason is None:
            library.load(progress)
            logger.info("computing with own kernels (%s)", library.instructions())
            return "own"
    except library.BuildError as error:
        reason = str(error)
        if wanted == "auto":
            logger.warning("the CPU kernels could not be compiled, torch's are used: %s", reason)
    if wanted == "own":
        raise UsageError(f"kernels is own, but there are none here: {reason}; use --kernels auto")
    logger.info("computing with torch's kernels: %s", reason)
    return "aten"


def adopt(model: Model, activation_bits: int) -> None:
    """Exchange the parts of a loaded model's `network` for those of the loaded kernels. Weights stay where they are.

    `activation_bits` is what the products with quantized weights round activations to, 8 or 16.
    """
    network = getattr(model, "network", None)
    if not isinstance(network, nn.Module):
        return
    for module in list(network.modules()):
        if isinstance(module, Attention):
            module.kernel = module.head_dim <= _LONGEST_HEAD and model.dtype in (torch.bfloat16, torch.float32)
        elif isinstance(module, OwnLayout):
            module.activation_bits = activation_bits
        for name, child in module.named_children():
            if type(child) is nn.Linear and _few_rows_pay(child):
                setattr(module, name, _few_rows(child))


def _few_rows_pay(layer: nn.Linear) -> bool:
    weight = layer.weight
    at_hand = weight.device.type == "cpu" and weight.is_contiguous() and not weight.is_meta
    return at_hand and weight.dtype == torch.bfloat16 and layer.bias is None


def _few_rows(layer: nn.Linear) -> FewRowsLinear:
    with torch.device("meta"):
        few = FewRowsLinear(layer.in_features, layer.out_features, bias=False)
    # The same parameter, so that weights that are tied stay so.
    few.weight = layer.weight
    return few.train(layer.training)
