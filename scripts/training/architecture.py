"""The tiny checkpoint's configuration, its initial weights, and their way to and from a folder."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from training import prompt

HIDDEN = 128
DECODER_LAYERS = 5
VISION_DEPTH = 4
DEEPSTACK = (1, 2)
# Head offsets (rows, columns) in patches that the tower's attention starts from, block by block: characters straddle
# neighbouring patches, and a tower that has to discover its neighbourhood spends most of its training on that.
START_OFFSETS = (
    ((0, -1), (0, 1), (-1, 0), (1, 0)),
    ((0, -1), (0, 1), (-1, 0), (1, 0)),
    ((0, -1), (0, 1), (0, -2), (0, 2)),
    ((0, -1), (0, 1), (0, 0), (0, 0)),
)
START_SHARPNESS = 3.0


def configuration() -> dict[str, Any]:
    """Give config.json in the layout of the published Qwen3-VL files."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": prompt.IMAGE_PAD,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": prompt.ENDOFTEXT,
            "dtype": "bfloat16",
            "eos_token_id": prompt.IM_END,
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "intermediate_size": 384,
            "max_position_embeddings": 4096,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 4,
            "num_hidden_layers": DECODER_LAYERS,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": prompt.VOCABULARY,
        },
        "tie_word_embeddings": True,
        "video_token_id": prompt.VIDEO_PAD,
        "vision_config": {
            "deepstack_visual_indexes": list(DEEPSTACK),
            "depth": VISION_DEPTH,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 128,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 384,
            "model_type": "qwen3_vl",
            "num_heads": 4,
            "num_position_embeddings": 256,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": prompt.VISION_END,
        "vision_start_token_id": prompt.VISION_START,
    }


def build() -> Qwen3VLForConditionalGeneration:
    """Build the model in fp32 with initial weights for a short training."""
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**configuration())).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                closing = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight"))
                closing = closing or ("blocks" in name and name.endswith("linear_fc2.weight"))
                weight.normal_(0.0, (0.1 if closing else 0.7) / math.sqrt(weight.shape[1]))
        model.model.language_model.embed_tokens.weight.normal_(0.0, 0.1)
        model.model.visual.pos_embed.weight.normal_(0.0, 0.02)
        for block, offsets in zip(model.model.visual.blocks, START_OFFSETS, strict=True):
            start_local(block.attn.qkv, offsets)
    return model


def start_local(qkv: nn.Linear, offsets: tuple[tuple[int, int], ...]) -> None:
    """Set query and key biases so that each head's attention starts on the patch at its offset."""
    assert qkv.bias is not None
    bias = qkv.bias.view(3, len(offsets), -1)
    bias.zero_()
    qkv.weight[: 2 * HIDDEN] *= 0.5
    quarter = bias.shape[-1] // 4
    half = 2 * quarter
    frequency = 1.0 / (10000.0 ** (torch.arange(0, half, 2) / half))
    size = math.sqrt(START_SHARPNESS * math.sqrt(bias.shape[-1]))
    for head, offset in enumerate(offsets):
        if offset == (0, 0):
            continue
        for axis, distance in enumerate(offset):
            for index in range(3):
                place = axis * quarter + index
                angle = -float(frequency[index]) * distance
                bias[0, head, place] = size
                bias[1, head, place] = size * math.cos(angle)
                bias[1, head, half + place] = size * math.sin(angle)
