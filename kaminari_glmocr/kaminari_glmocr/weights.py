"""What the tensors of a GLM-OCR checkpoint are called, and where each goes in the module of `model.py`.

Published files have q, k and v apart, and gate and up joined, gate first. The multi-token prediction layer counts as one more
decoder layer: a whole block with the draft head's own tensors beside it. Read beside the same file of another model package,
this one is the list of what differs.
"""

from __future__ import annotations

from pathlib import Path

from kaminari_core.errors import CheckpointError, UsageError
from kaminari_core.weights import Rule, fused, tensor_names
from kaminari_glmocr.config import Config, TextConfig

TIES = {"decoder.lm_head.weight": "decoder.embed_tokens.weight"}
"""Shared tensors of a checkpoint whose config.json ties them."""

_LAYER = r"model\.language_model\.layers\.{}\."


def rules(config: Config, *, draft: bool = False) -> list[Rule]:
    """The rules for `load_weights`; with `draft`, those of the multi-token prediction layer as well."""
    return [
        *(_draft(config.text) if draft else []),
        Rule(r"model\.language_model\.(embed_tokens|norm)\.weight", r"decoder.\1.weight"),
        Rule(r"lm_head\.weight", "decoder.lm_head.weight"),
        *_block(_LAYER.format(r"(?P<layer>\d+)"), r"decoder.layers.\g<layer>.", config.text),
        Rule(r"model\.visual\.patch_embed\.proj\.(weight|bias)", r"vision.tower.patch_embed.\1"),
        Rule(r"model\.visual\.(.+)", r"vision.tower.\1"),
    ]


def draft_copies(config: Config) -> dict[str, str]:
    """What the draft head shares with the decoder where the checkpoint has no copies for it, or copies that are equal."""
    head = "decoder.lm_head.weight"
    return {
        "draft.embed_tokens.weight": "decoder.embed_tokens.weight",
        "draft.head.weight": TIES[head] if config.text.tied else head,
    }


def draft_patterns(config: Config) -> list[str]:
    """The names of the multi-token prediction layers' tensors, to be left out where they are not used. Nothing else matches."""
    text = config.text
    layers = range(text.layers, text.layers + text.draft_layers)
    return [rule.pattern for layer in layers for rule in _draft(text, layer)]


def check_draft(checkpoint: Path, config: Config) -> None:
    """Raise UsageError for a checkpoint without a multi-token prediction layer, CheckpointError for one with several."""
    layer = config.text.layers
    prefix = f"model.language_model.layers.{layer}."
    there = any(name.startswith(prefix) for name in tensor_names(checkpoint))
    if config.text.draft_layers == 0 or not there:
        missing = f"tensors {prefix}*" if config.text.draft_layers else "num_nextn_predict_layers in its config.json"
        raise UsageError(
            f"the checkpoint {checkpoint} has no draft head (no {missing}); use --draft prompt-lookup or --draft none"
        )
    if config.text.draft_layers > 1:
        raise CheckpointError(
            f"config.json of {checkpoint} has num_nextn_predict_layers {config.text.draft_layers}; only 1 is supported"
        )


def _block(pattern: str, target: str, text: TextConfig) -> list[Rule]:
    """The rules of one decoder block, whose tensors' names begin with `pattern`."""
    q, kv = text.heads * text.head_dim, text.kv_heads * text.head_dim
    norms = "(?P<norm>input_layernorm|post_self_attn_layernorm|post_attention_layernorm|post_mlp_layernorm)"
    return [
        *fused(pattern + r"self_attn\.{}_proj\.weight", target + "attention.qkv_proj.weight", q=q, k=kv, v=kv),
        Rule(pattern + r"self_attn\.o_proj\.weight", target + "attention.o_proj.weight"),
        Rule(pattern + r"mlp\.(?P<part>gate_up_proj|down_proj)\.weight", target + r"mlp.\g<part>.weight"),
        Rule(pattern + norms + r"\.weight", target + r"\g<norm>.weight"),
    ]


def _draft(text: TextConfig, layer: int | None = None) -> list[Rule]:
    prefix = _LAYER.format(text.layers if layer is None else layer)
    return [
        Rule(prefix + r"(eh_proj|enorm|hnorm|embed_tokens)\.weight", r"draft.\1.weight"),
        Rule(prefix + r"shared_head\.(norm|head)\.weight", r"draft.\1.weight"),
        *_block(prefix, "draft.block.", text),
    ]
