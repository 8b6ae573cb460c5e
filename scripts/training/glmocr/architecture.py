"""The configuration of GLM-OCR's tiny checkpoint, its draft head, and initial weights for a short training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import GlmOcrConfig, GlmOcrForConditionalGeneration
from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrRMSNorm, GlmOcrTextDecoderLayer

from training.architecture import START_OFFSETS, start_local
from training.glmocr.prompt import ENDOFTEXT, IDS, IMAGE, USER, VOCABULARY

HIDDEN = 160
DECODER_LAYERS = 4
VISION_HIDDEN = 128
EPSILON = 1e-5
# A layer adds what its last norms let through: small at first, so that the visual tokens are seen behind all layers.
START_ADDED = 0.3
# Queries and keys of the tower are normed: this much brings the start on neighbouring patches back to its sharpness.
START_NORM = 1.8


def configuration() -> dict[str, Any]:
    """Give config.json in the layout of the published GLM-OCR files."""
    return {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "model_type": "glm_ocr",
        "text_config": {
            "model_type": "glm_ocr_text",
            "pad_token_id": ENDOFTEXT,
            "vocab_size": VOCABULARY,
            "eos_token_id": [ENDOFTEXT, USER],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "intermediate_size": 384,
            "max_position_embeddings": 4096,
            "num_attention_heads": 4,
            "num_hidden_layers": DECODER_LAYERS,
            "num_nextn_predict_layers": 1,
            "num_key_value_heads": 2,
            "rms_norm_eps": EPSILON,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 6, 6],
                "partial_rotary_factor": 1.0,
                "rope_theta": 10000,
            },
            "tie_word_embeddings": False,
            "use_cache": True,
        },
        "vision_config": {
            "model_type": "glm_ocr_vision",
            "hidden_size": VISION_HIDDEN,
            "depth": len(START_OFFSETS),
            "num_heads": len(START_OFFSETS[0]),
            "attention_bias": True,
            "intermediate_size": 256,
            "hidden_act": "silu",
            "hidden_dropout_prob": 0.0,
            "initializer_range": 0.02,
            "image_size": 336,
            "patch_size": 14,
            "out_hidden_size": HIDDEN,
            "rms_norm_eps": EPSILON,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "image_start_token_id": IDS["<|begin_of_image|>"],
        "image_end_token_id": IDS["<|end_of_image|>"],
        "video_start_token_id": IDS["<|begin_of_video|>"],
        "video_end_token_id": IDS["<|end_of_video|>"],
        "image_token_id": IMAGE,
        "video_token_id": IDS["<|video|>"],
    }


class DraftHead(nn.Module):
    """The multi-token prediction layer but for the embedding and the output head, which are the decoder's while training."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.enorm = GlmOcrRMSNorm(HIDDEN, EPSILON)
        self.hnorm = GlmOcrRMSNorm(HIDDEN, EPSILON)
        self.eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.block = GlmOcrTextDecoderLayer(config, layer)
        self.norm = GlmOcrRMSNorm(HIDDEN, EPSILON)


def build() -> GlmOcrForConditionalGeneration:
    """Build the model in fp32 with initial weights for a short training."""
    model = GlmOcrForConditionalGeneration(GlmOcrConfig(**configuration())).float()
    with torch.no_grad():
        start(model)
        model.model.language_model.embed_tokens.weight.normal_(0.0, 0.3)
        for block, offsets in zip(model.model.visual.blocks, START_OFFSETS, strict=True):
            start_local(block.attn.qkv, offsets)
            block.attn.q_norm.weight.fill_(START_NORM)
            block.attn.k_norm.weight.fill_(START_NORM)
    return model


def build_draft(model: GlmOcrForConditionalGeneration) -> DraftHead:
    """Build a draft head with initial weights."""
    draft = DraftHead(model.config.text_config, DECODER_LAYERS).float()
    with torch.no_grad():
        start(draft)
    return draft


def start(module: nn.Module) -> None:
    """Draw the matrices of a module, closing ones small, and let the norms behind attention and MLP pass little."""
    for name, weight in module.named_parameters():
        if name.endswith(("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")):
            weight.fill_(START_ADDED)
        elif weight.ndim == 2 and "embed" not in name:
            closing = "blocks" in name and name.endswith(("attn.proj.weight", "down_proj.weight"))
            weight.normal_(0.0, (0.1 if closing else 0.7) / math.sqrt(weight.shape[1]))
        elif name.endswith("downsample.weight"):
            weight.normal_(0.0, 0.7 / math.sqrt(weight[0].numel()))
