"""The checkpoint folder: weights in bf16 and the files around them in the layout of the published Qwen3-VL folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import Qwen3VLForConditionalGeneration

from training import prompt
from training.architecture import configuration
from training.canvas import MAX_TOKENS, MIN_TOKENS, UNIT

# Qwen's own split; without merges it changes nothing, but the class that loads the file puts it there in any case.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load(folder: Path) -> Qwen3VLForConditionalGeneration:
    """Load a checkpoint folder in fp32."""
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def save(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Write a whole checkpoint folder; the tied output head is left out as in the published files."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write(folder / "config.json", configuration())
    write(folder / "generation_config.json", _generation())
    write(folder / "preprocessor_config.json", _preprocessor())
    write(folder / "tokenizer_config.json", _tokenizer_settings())
    (folder / "chat_template.jinja").write_text(prompt.TEMPLATE)
    tokenizer().save(str(folder / "tokenizer.json"), pretty=False)


def tokenizer() -> Tokenizer:
    """Build the byte tokenizer: token id = byte value, then the special tokens."""
    built = Tokenizer(models.BPE(vocab=byte_names(), merges=[]))
    built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in prompt.SPECIALS])
    return built


def byte_names() -> dict[str, int]:
    """Give the printable character that byte-level BPE writes for each byte: itself, or one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {chr(byte): byte for byte in plain}
    hidden = [byte for byte in range(256) if byte not in set(plain)]
    return names | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


def _generation() -> dict[str, Any]:
    return {
        "bos_token_id": prompt.ENDOFTEXT,
        "do_sample": True,
        "eos_token_id": [prompt.IM_END, prompt.ENDOFTEXT],
        "pad_token_id": prompt.ENDOFTEXT,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }


def _preprocessor() -> dict[str, Any]:
    return {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": UNIT // 2,
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": MAX_TOKENS * UNIT**2, "shortest_edge": MIN_TOKENS * UNIT**2},
        "temporal_patch_size": 2,
    }


def _tokenizer_settings() -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(256 + index): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, name in enumerate(prompt.SPECIALS)
        },
        "additional_special_tokens": [name for name in prompt.SPECIALS if name != "<|endoftext|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n")
