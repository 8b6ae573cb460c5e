"""What the tensors of a Qwen3-VL checkpoint are called, and where each goes in the module of `model.py`.

Published files have q, k, v and gate, up apart, and the experts of the mixture-of-experts models joined and transposed; the
module has the fused forms. Read beside the same file of another model package, this one is the list of what differs.
"""

from __future__ import annotations

from kaminari_core.weights import Rule, fused
from kaminari_qwen3vl.config import Config

TIES = {"decoder.lm_head.weight": "decoder.embed_tokens.weight"}
"""Shared tensors of a checkpoint whose config.json ties them."""

_LAYER = r"model\.language_model\.layers\.(\d+)\."
_BLOCK = r"decoder.layers.\1."


def rules(config: Config) -> list[Rule]:
    """The rules for `load_weights`."""
    text = config.text
    q, kv = text.heads * text.head_dim, text.kv_heads * text.head_dim
    attention = fused(_LAYER + r"self_attn\.{}_proj\.weight", _BLOCK + "attention.qkv_proj.weight", q=q, k=kv, v=kv)
    mlp = fused(
        _LAYER + r"mlp\.{}_proj\.weight",
        _BLOCK + "mlp.gate_up_proj.weight",
        gate=text.intermediate,
        up=text.intermediate,
    )
    return [
        Rule(r"model\.language_model\.(embed_tokens|norm)\.weight", r"decoder.\1.weight"),
        Rule(r"lm_head\.weight", "decoder.lm_head.weight"),
        *attention,
        Rule(_LAYER + r"self_attn\.(o_proj|q_norm|k_norm)\.weight", _BLOCK + r"attention.\2.weight"),
        *mlp,
        Rule(_LAYER + r"mlp\.down_proj\.weight", _BLOCK + "mlp.down_proj.weight"),
        Rule(_LAYER + r"mlp\.gate\.weight", _BLOCK + "mlp.router.weight"),
        Rule(_LAYER + r"mlp\.experts\.(gate_up_proj|down_proj)", _BLOCK + r"mlp.\2", transposed=True),
        Rule(_LAYER + r"(input_layernorm|post_attention_layernorm)\.weight", _BLOCK + r"\2.weight"),
        Rule(r"model\.visual\.patch_embed\.proj\.(weight|bias)", r"vision.tower.patch_embed.\1"),
        Rule(r"model\.visual\.(.+)", r"vision.tower.\1"),
    ]
