"""The vision tower: the class of transformers, with its patch embedding as a matrix product and dense attention in its blocks.

The tower runs once per picture, so its Python costs little and there is no reason to write it again; the decoder, which runs
once per token, is our own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kaminari_core.flow import Patches
from kaminari_core.layers import PatchEmbedding
from kaminari_core.stock import quiet_import
from kaminari_core.vision import StockTower
from kaminari_qwen3vl.config import VisionConfig


class VisionTower(StockTower):
    """One picture's patches to the features that stand for it in the prompt."""

    def __init__(self, config: VisionConfig, device: torch.device) -> None:
        """Build on the current default device, which is meta while a checkpoint loads; `device` is where it will run."""
        with quiet_import():
            # Importing transformers takes seconds, and only a loaded model needs it.
            from transformers import AutoConfig, AutoModel

            settings = AutoConfig.for_model(config.model_type, **config.settings)
            tower = AutoModel.from_config(settings, attn_implementation="sdpa")
        tower.patch_embed = PatchEmbedding(
            config.channels, config.temporal_patch_size, config.patch_size, settings.hidden_size
        )
        # In no checkpoint: computed when the class is built, which must not happen on meta.
        with torch.device(device):
            tower.rotary_pos_emb = type(tower.rotary_pos_emb)(settings)
        super().__init__(tower)

    def forward(self, patches: Patches) -> tuple[Tensor, list[Tensor]]:
        """The features of one picture and its deepstack features, each (visual tokens, decoder hidden size)."""
        weight = self.tower.patch_embed.weight
        grid = torch.tensor([patches.grid], device=weight.device)
        output = self.tower(patches.values.to(weight.device, non_blocking=True), grid_thw=grid, return_dict=True)
        return output.pooler_output, list(output.deepstack_features)
