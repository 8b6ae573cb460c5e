"""How far a quantized model's logits are from those of the same weights in bfloat16, on the same tokens.

Both are fed the same text, so a first difference does not multiply: what is compared is one step at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kaminari_core.cache import StaticCache
from kaminari_core.flow import Prepared
from kaminari_core.layer_call import run_layer
from kaminari_core.protocols import Model, Step

STEPS = 8
"""Decode steps that are compared, after the prefill."""


@dataclass(frozen=True, slots=True)
class LogitError:
    """`relative` is the root mean square of the differences over that of the logits, over all positions; `agreement` the share
    of positions whose best token is the same.
    """

    relative: float
    agreement: float


def forced_logits(model: Model, prepared: Prepared, steps: int = STEPS) -> Tensor:
    """The logits, float32 (steps + 1, vocabulary), behind a prompt and behind its first tokens fed again, one by one."""
    cache = StaticCache(model.shape, 1, prepared.length + steps, model.device, model.dtype)
    slot = cache.claim()
    kept = [model.prefill(model.embed(prepared), 0, prepared.length, cache, slot).float()]
    for step in range(steps):
        fed = (prepared.tokens[step % prepared.length], prepared.next_position + step, prepared.length + step)
        tokens, positions, cursors = (torch.tensor([[value]], device=model.device) for value in fed)
        with torch.inference_mode():
            logits = model.decode(Step(tokens, positions, cursors, cache.max_length), cache, run_layer)
        kept.append(logits[0, 0].float())
    return torch.stack(kept).cpu()


def logit_error(ours: Tensor, exact: Tensor) -> LogitError:
    """Compare two results of `forced_logits`."""
    relative = float((ours - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())
    return LogitError(relative, float((ours.argmax(-1) == exact.argmax(-1)).float().mean()))
