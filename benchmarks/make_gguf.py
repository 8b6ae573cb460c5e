"""Writes a checkpoint's decoder as a GGUF file, so that llama.cpp can be measured on the very same weights.

    python benchmarks/make_gguf.py --checkpoint build/random-2b --type Q4_0 --out build/random-2b-q4_0.gguf

The decoder of Qwen3-VL on text is that of Qwen3, an architecture that llama.cpp knows. `--type` is Q4_0 (every matrix, the tied
head among them, four bits in blocks of 32, by the gguf package's own quantizer) or BF16. The tokenizer is the checkpoint's,
filled up to the size of the vocabulary with tokens that no text contains.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors import safe_open

ROLES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The names of a layer's tensors in a checkpoint and in a file."""


def main() -> None:
    """Read the options and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--type", choices=["Q4_0", "BF16"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    make_gguf(options.checkpoint, GGMLQuantizationType[options.type], options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:,.1f} MB")


def make_gguf(checkpoint: Path, kind: GGMLQuantizationType, out: Path) -> None:
    """Write the decoder, one tensor at a time."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    writer = GGUFWriter(out, "qwen3")
    add_sizes(writer, text)
    add_tokenizer(writer, checkpoint, text["vocab_size"])
    sources = tensor_sources(checkpoint)
    names = tensor_names(text["num_hidden_layers"], tied=config["tie_word_embeddings"])
    for name, source in names.items():
        with safe_open(sources[source], "pt") as file:
            shape = file.get_slice(source).get_shape()
        stored = GGMLQuantizationType.F32 if len(shape) == 1 else kind
        bytes_shape = quants.quant_shape_to_byte_shape(shape, stored)
        size = int(np.prod(bytes_shape))
        if stored == GGMLQuantizationType.F32:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size, stored)
        else:
            writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), size, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for source in names.values():
        with safe_open(sources[source], "pt") as file:
            tensor = file.get_tensor(source)
        writer.write_tensor_data(converted(tensor, GGMLQuantizationType.F32 if tensor.dim() == 1 else kind))
    writer.close()


def converted(tensor: torch.Tensor, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """The bytes of one tensor as a file holds them."""
    if kind == GGMLQuantizationType.BF16 and tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint8).numpy()
    return quants.quantize(tensor.float().numpy(), kind)


def tensor_names(layers: int, *, tied: bool) -> dict[str, str]:
    """The name in the file of each tensor, and its name in the checkpoint."""
    prefix = "model.language_model"
    names = {"token_embd.weight": f"{prefix}.embed_tokens.weight", "output_norm.weight": f"{prefix}.norm.weight"}
    if not tied:
        names["output.weight"] = "lm_head.weight"
    for layer in range(layers):
        names |= {
            f"blk.{layer}.{ours}.weight": f"{prefix}.layers.{layer}.{theirs}.weight" for theirs, ours in ROLES.items()
        }
    return names


def tensor_sources(checkpoint: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint."""
    found: dict[str, Path] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def add_sizes(writer: GGUFWriter, text: dict[str, Any]) -> None:
    """The architecture's sizes."""
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_rope_freq_base(float(text["rope_theta"]))
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])


def add_tokenizer(writer: GGUFWriter, checkpoint: Path, size: int) -> None:
    """The checkpoint's byte-level tokenizer; ids without a token get one that no text contains."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    ids = dict(tokenizer["model"]["vocab"])
    special = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    by_id = {index: token for token, index in {**ids, **special}.items()}
    tokens = [by_id.get(index, f"<|unused_{index}|>") for index in range(size)]
    # Those that stand for no text of the tokenizer are shown all the same: random weights choose them most of the time.
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
