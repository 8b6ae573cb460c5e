"""The vision tower: the class of transformers, with its patch embedding as a matrix product and dense attention in its blocks.

The tower runs once per picture, so its Python costs little and there is no reason to write it again; the decoder, which runs
once per token, is our own. Its rotary embedding is another one than the decoder's: half split, and in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kaminari_core.flow import Patches
from kaminari_core.layers import PatchEmbedding
from kaminari_core.stock import quiet_import
from kaminari_core.vision import StockTower
from kaminari_glmocr.config import VisionConfig


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

    def forward(self, patches: Patches) -> Tensor:
        """The features of one picture, (visual tokens, decoder hidden size)."""
        weight = self.tower.patch_embed.weight
        grid = torch.tensor([patches.grid], device=weight.device)
        features: Tensor = self.tower(
            patches.values.to(weight.device, non_blocking=True), grid_thw=grid, return_dict=True
        ).pooler_output
        return features
