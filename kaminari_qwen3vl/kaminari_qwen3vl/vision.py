"""The vision tower: the class of transformers, with its patch embedding computed as a matrix product.

The tower runs once per picture, so its Python costs little and there is no reason to write it again; the decoder, which runs
once per token, is our own. The stock patch embedding is a Conv3d whose stride equals its kernel, which is a matrix product that
some libraries run very slowly in bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaminari_core.flow import Patches
from kaminari_qwen3vl.config import VisionConfig


@contextmanager
def quiet_import() -> Iterator[None]:
    """Keep what importing the model classes of transformers logs about torchao's optional parts from users."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class PatchEmbedding(nn.Module):
    """The patch embedding with the parameters of the Conv3d that it replaces."""

    def __init__(self, config: VisionConfig, hidden: int) -> None:
        super().__init__()
        kernel = (config.channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.weight = nn.Parameter(torch.empty(hidden, *kernel))
        self.bias = nn.Parameter(torch.empty(hidden))

    def forward(self, patches: Tensor) -> Tensor:
        """(patches, channels * frames * height * width) to (patches, hidden), in the dtype of the weights."""
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class VisionTower(nn.Module):
    """One picture's patches to the features that stand for it in the prompt."""

    def __init__(self, config: VisionConfig, device: torch.device) -> None:
        """Build on the current default device, which is meta while a checkpoint loads; `device` is where it will run."""
        super().__init__()
        with quiet_import():
            # Importing transformers takes seconds, and only a loaded model needs it.
            from transformers import AutoConfig, AutoModel

            settings = AutoConfig.for_model(config.model_type, **config.settings)
            tower = AutoModel.from_config(settings, attn_implementation="sdpa")
        tower.patch_embed = PatchEmbedding(config, settings.hidden_size)
        # In no checkpoint: computed when the class is built, which must not happen on meta.
        with torch.device(device):
            tower.rotary_pos_emb = type(tower.rotary_pos_emb)(settings)
        self.tower = tower

    def forward(self, patches: Patches) -> tuple[Tensor, list[Tensor]]:
        """The features of one picture and its deepstack features, each (visual tokens, decoder hidden size)."""
        weight = self.tower.patch_embed.weight
        grid = torch.tensor([patches.grid], device=weight.device)
        output = self.tower(patches.values.to(weight.device), grid_thw=grid, return_dict=True)
        return output.pooler_output, list(output.deepstack_features)
