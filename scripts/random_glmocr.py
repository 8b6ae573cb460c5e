"""GLM-OCR's part of `make_random_checkpoint`: configuration, settings, tokenizer, shapes of the draft head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from random_tokenizer import byte_level

# hidden, intermediate, layers, heads, kv heads, head size, M-RoPE sections; vision: depth, hidden, intermediate, heads
SIZES: dict[str, dict[str, Any]] = {
    "glmocr": {"text": (1536, 4608, 16, 16, 8, 128, [16, 24, 24]), "vision": (24, 1024, 4096, 16)},
    "tiny-glmocr": {"text": (64, 96, 2, 4, 2, 32, [4, 6, 6]), "vision": (2, 32, 64, 2)},
}
SPECIAL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
)  # fmt: skip
MARKED_TEXT = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|image|>", "<|video|>")
"""Added to the vocabulary, but not marked special; the placeholder of a picture is among them."""
NAMELESS = 8
"""Ids at the end of the vocabulary that no token string has."""
CORPUS = (
    "Text Recognition: Table Recognition: Formula Recognition:",
    "<table><tr><td>12.50</td><td>EUR</td></tr></table> \\frac{a}{b} = \\sqrt{x^2}",
    "TOTAL 12.50 EUR 2024-05-17 Thank you for your visit. Invoice number 0001234",
    "the quick brown fox jumps over the lazy dog while the other dog reads the newspaper",
)
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n' + message.content.strip() }}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == 'image' %}
                    {{- '<|begin_of_image|><|image|><|end_of_image|>' }}
                {%- elif 'text' in part %}
                    {{- part.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


def configuration(size: str, ids: dict[str, int], *, layers: int | None, draft_head: bool) -> dict[str, Any]:
    """config.json in the layout of the published file, which has neither `in_channels` nor a tie flag at the top."""
    facts = SIZES[size]
    hidden, intermediate, depth, heads, kv_heads, head_dim, sections = facts["text"]
    vision_depth, vision_hidden, vision_intermediate, vision_heads = facts["vision"]
    tiny = size.startswith("tiny")
    text = {
        "model_type": "glm_ocr_text", "pad_token_id": ids["<|endoftext|>"],
        "vocab_size": len(ids) + NAMELESS if tiny else 59_392,
        "eos_token_id": [ids["<|endoftext|>"], ids["<|user|>"]], "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": head_dim, "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": intermediate,
        "max_position_embeddings": 4096 if tiny else 131_072, "num_attention_heads": heads,
        "num_hidden_layers": layers or depth, "num_nextn_predict_layers": 1 if draft_head else 0,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default", "mrope_section": sections, "partial_rotary_factor": 1.0, "rope_theta": 10_000,
        },
        "tie_word_embeddings": False, "use_cache": True,
    }  # fmt: skip
    vision = {
        "model_type": "glm_ocr_vision", "hidden_size": vision_hidden, "depth": vision_depth, "num_heads": vision_heads,
        "attention_bias": True, "intermediate_size": vision_intermediate, "hidden_act": "silu",
        "hidden_dropout_prob": 0.0, "image_size": 336, "patch_size": 14, "out_hidden_size": hidden,
        "rms_norm_eps": 1e-5, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return {
        "architectures": ["GlmOcrForConditionalGeneration"], "model_type": "glm_ocr", "text_config": text,
        "vision_config": vision, "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"], "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"], "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
    }  # fmt: skip


def write_settings(out: Path, config: dict[str, Any]) -> None:
    """Write config.json, generation_config.json and preprocessor_config.json."""
    text = config["text_config"]
    generation = {"do_sample": False, "eos_token_id": text["eos_token_id"], "pad_token_id": text["pad_token_id"]}
    preprocessor = {
        "image_processor_type": "Glm46VImageProcessor", "processor_class": "Glm46VProcessor", "patch_size": 14,
        "merge_size": 2, "temporal_patch_size": 2, "do_rescale": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "size": {"shortest_edge": 12_544, "longest_edge": 9_633_792},
    }  # fmt: skip
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("preprocessor_config.json", preprocessor),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(out: Path) -> dict[str, int]:
    """Write a byte-level tokenizer of about 400 tokens with GLM's control tokens and template; returns all tokens' ids."""
    from transformers import AddedToken, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(CORPUS), padding_side="left")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKED_TEXT])
    tokenizer.eos_token = tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))


def draft_shapes(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The multi-token prediction layer: a whole decoder block, numbered as one more, with the draft head's own tensors."""
    text = config["text_config"]
    if not text["num_nextn_predict_layers"]:
        return {}
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    first, layer = "model.language_model.layers.0.", f"model.language_model.layers.{text['num_hidden_layers']}."
    block = {name.replace(first, layer): shape for name, shape in shapes.items() if name.startswith(first)}
    return block | {
        layer + "eh_proj.weight": (hidden, 2 * hidden),
        layer + "enorm.weight": (hidden,),
        layer + "hnorm.weight": (hidden,),
        layer + "embed_tokens.weight": (vocabulary, hidden),
        layer + "shared_head.norm.weight": (hidden,),
        layer + "shared_head.head.weight": (vocabulary, hidden),
    }
