"""Write a Qwen3-VL or GLM-OCR checkpoint with random weights: the true shapes of a published size, or a tiny one for tests.

    python scripts/make_random_checkpoint.py --size 2b --out build/random-2b
    python scripts/make_random_checkpoint.py --size glmocr --out build/random-glmocr

The names and shapes come from the class of transformers, built on meta, so that they are not our own opinion. The files have the
published layout: sharded safetensors, config.json with `rope_scaling`, generation_config.json, preprocessor_config.json and a
byte-level tokenizer. Memory stays at about one shard.

The tiny sizes are adversarial: their weights are drawn so that replies vary, margins are clear and a port that gets positions,
section layout, rotation or deepstack wrong says something else. (The usual initialization of 0.02 with unit norms repeats one
token whatever is wrong.)
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import random_glmocr
from random_tokenizer import byte_level

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKED_TEXT = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens of the vocabulary that are found in text: added, but not special."""
CORPUS = (
    "Read all the text in the image. Describe this image. Convert this page to Markdown.",
    "user system assistant You are a helpful assistant. What does the first picture show?",
    "TOTAL 12.50 EUR 2024-05-17 Thank you for your visit. Invoice number 0001234",
    "the quick brown fox jumps over the lazy dog while the other dog reads the newspaper",
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == 'image' %}
                    {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
                {%- elif 'text' in part %}
                    {{- part.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# hidden, intermediate, layers, heads, kv heads, tied, vision (depth, hidden, intermediate), deepstack
SIZES: dict[str, dict[str, Any]] = {
    "2b": {"text": (2048, 6144, 28, 16, 8), "tied": True, "vision": (24, 1024, 4096), "deepstack": (5, 11, 17)},
    "4b": {"text": (2560, 9728, 36, 32, 8), "tied": True, "vision": (24, 1024, 4096), "deepstack": (5, 11, 17)},
    "8b": {"text": (4096, 12288, 36, 32, 8), "tied": False, "vision": (27, 1152, 4304), "deepstack": (8, 16, 24)},
    "32b": {"text": (5120, 25600, 64, 64, 8), "tied": False, "vision": (27, 1152, 4304), "deepstack": (8, 16, 24)},
    "30b-a3b": {
        "text": (2048, 6144, 48, 32, 4), "tied": False, "vision": (27, 1152, 4304), "deepstack": (8, 16, 24),
        "experts": (128, 8, 768),
    },
    "tiny": {"text": (64, 96, 2, 4, 2), "tied": True, "vision": (2, 32, 64), "deepstack": (0, 1)},
    "tiny-untied": {"text": (64, 96, 2, 4, 2), "tied": False, "vision": (2, 32, 64), "deepstack": (0, 1)},
    "tiny-moe": {
        "text": (64, 96, 2, 4, 2), "tied": False, "vision": (2, 32, 64), "deepstack": (0, 1), "experts": (8, 2, 48),
    },
}  # fmt: skip


def make_checkpoint(
    out: Path,
    size: str,
    *,
    layers: int | None = None,
    draft_head: bool = True,
    shard_bytes: int = 10**9,
    seed: int = 0,
) -> Path:
    """Write a checkpoint of one of the sizes into the directory `out`, with `layers` decoder layers if given; returns `out`.

    Published sizes are bfloat16, tiny ones float32. GLM-OCR has its multi-token prediction layer unless `draft_head` is off.
    """
    out.mkdir(parents=True, exist_ok=True)
    tiny = size.startswith("tiny")
    if size in random_glmocr.SIZES:
        ids = random_glmocr.write_tokenizer(out)
        config = random_glmocr.configuration(size, ids, layers=layers, draft_head=draft_head)
        random_glmocr.write_settings(out, config)
        shapes = tensor_shapes(config)
        shapes |= random_glmocr.draft_shapes(config, shapes)
    else:
        ids = write_tokenizer(out)
        config = configuration(size, ids, vocabulary=len(ids) if tiny else 151_936, layers=layers)
        write_settings(out, config, ids, min_pixels=4 * 32**2 if tiny else 64 * 32**2)
        shapes = tensor_shapes(config)
    dtype = torch.float32 if tiny else torch.bfloat16
    generator = torch.Generator().manual_seed(seed)
    draw = draw_adversarial if tiny else draw_plain
    tensors = ((name, draw(name, shape, generator).to(dtype)) for name, shape in shapes.items())
    write_shards(out, tensors, shard_bytes)
    return out


def configuration(size: str, ids: dict[str, int], *, vocabulary: int, layers: int | None) -> dict[str, Any]:
    """config.json in the layout of the published files."""
    facts = SIZES[size]
    hidden, intermediate, depth, heads, kv_heads = facts["text"]
    vision_depth, vision_hidden, vision_intermediate = facts["vision"]
    tiny = size.startswith("tiny")
    model_type = "qwen3_vl_moe" if "experts" in facts else "qwen3_vl"
    text = {
        "model_type": f"{model_type}_text", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers or depth, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 32 if tiny else 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "max_position_embeddings": 4096 if tiny else 262_144,
        "rope_theta": 10_000 if tiny else 5_000_000, "eos_token_id": ids["<|im_end|>"],
        "rope_scaling": {
            "rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5] if tiny else [24, 20, 20],
        },
    }  # fmt: skip
    if "experts" in facts:
        count, active, expert_intermediate = facts["experts"]
        text |= {
            "num_experts": count, "num_experts_per_tok": active, "moe_intermediate_size": expert_intermediate,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
        }  # fmt: skip
    vision = {
        "model_type": model_type, "depth": vision_depth, "hidden_size": vision_hidden, "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": vision_intermediate, "num_heads": 2 if tiny else 16, "in_channels": 3, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden,
        "num_position_embeddings": 64 if tiny else 2304, "deepstack_visual_indexes": list(facts["deepstack"]),
    }  # fmt: skip
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration" if "experts" in facts else "Qwen3VLForConditionalGeneration"],
        "model_type": model_type, "tie_word_embeddings": facts["tied"], "text_config": text, "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip


def write_settings(out: Path, config: dict[str, Any], ids: dict[str, int], *, min_pixels: int) -> None:
    """Write config.json, generation_config.json and preprocessor_config.json."""
    generation = {
        "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.0,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "pad_token_id": ids["<|endoftext|>"],
    }  # fmt: skip
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor", "patch_size": 16,
        "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": min_pixels, "longest_edge": 16_384 * 32**2},
    }  # fmt: skip
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("preprocessor_config.json", preprocessor),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(out: Path) -> dict[str, int]:
    """Write a byte-level tokenizer of about 400 tokens with Qwen's control tokens and template; returns all tokens' ids."""
    model = json.loads(byte_level(CORPUS).to_str())["model"]

    from transformers import AddedToken, Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKED_TEXT])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes on disk: those of the reference class, without a tied head, experts transposed."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = json.loads(json.dumps(config))
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(settings)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del shapes["lm_head.weight"]
    return {
        name: (shape[0], shape[2], shape[1]) if ".mlp.experts." in name else shape for name, shape in shapes.items()
    }


def draw_plain(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norms of one, biases of zero, and the rest small: good for sizes and times, not for comparing."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name:
        return torch.ones(shape)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16).mul_(0.02)


def draw_adversarial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Unit-gain products, peaked attention, small embeddings, random norms and a final norm that spreads the logits."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.1 * noise
    if "q_norm" in name or "k_norm" in name:
        return 1.7 + 0.3 * noise
    if name == "model.language_model.norm.weight" or "shared_head.norm" in name:
        return 4.0 * (1 + 0.3 * noise)
    if "norm" in name:
        return 1 + 0.3 * noise
    if "embed_tokens" in name or name == "lm_head.weight" or "shared_head.head" in name:
        return 0.1 * noise
    if "pos_embed" in name:
        return 0.5 * noise
    fan_in = shape[1] if ".mlp.experts." in name else math.prod(shape[1:])
    # Where no norm on queries and keys peaks the attention (GLM-OCR's decoder); where one does, this changes nothing.
    gain = 1.7 if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")) else 1.0
    return gain * noise / math.sqrt(fan_in)


def write_shards(out: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write tensors as they come into shards of about `shard_bytes`, and the index; one file without index if one is enough."""
    files: list[Path] = []
    names: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        files.append(out / f"shard-{len(files)}.safetensors")
        save_file(shard, files[-1], metadata={"format": "pt"})
        names.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor.contiguous()
        total += tensor.nbytes
    flush()
    rename = shard_name(len(files))
    for number, file in enumerate(files):
        file.rename(out / rename(number))
    if len(files) > 1:
        weight_map = {name: rename(number) for number, group in enumerate(names) for name in group}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def shard_name(count: int) -> Callable[[int], str]:
    """How published checkpoints call shard `index` of `count`."""
    if count == 1:
        return lambda index: "model.safetensors"
    return lambda index: f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES | random_glmocr.SIZES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="decoder layers, instead of those of the size")
    parser.add_argument("--no-draft-head", action="store_true", help="GLM-OCR without its multi-token prediction layer")
    parser.add_argument("--shard-bytes", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out = make_checkpoint(
        arguments.out,
        arguments.size,
        layers=arguments.layers,
        draft_head=not arguments.no_draft_head,
        shard_bytes=arguments.shard_bytes,
        seed=arguments.seed,
    )
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
