"""The stock implementation: how transformers loads GLM-OCR, for parity checks and benchmarks.

It drops the tensors of the multi-token prediction layer, so it is no reference for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kaminari_core.layers import PatchEmbedding
from kaminari_core.stock import StockModel, quiet_import


class StockGlmOcr(StockModel):
    """A checkpoint loaded by transformers: `kaminari_core.protocols.Reference`."""


def load(checkpoint: Path, device: torch.device, dtype: torch.dtype) -> StockGlmOcr:
    """Load a checkpoint directory with the class of transformers, its patch embedding as a Linear like ours."""
    with quiet_import():
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype, local_files_only=True)
    # In this model alone: the library's own fusion would change the class for every later model of the process.
    tower = model.model.visual
    tower.patch_embed = PatchEmbedding.of(tower.patch_embed.proj)
    return StockGlmOcr(model.to(device).eval(), _compiling)


def _compiling(mode: str) -> Any:
    from transformers import CompileConfig

    return CompileConfig(fullgraph=True, mode=mode)
