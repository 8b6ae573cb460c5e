"""The checkpoint folder of GLM-OCR: weights in bf16, the draft head as one more layer, and the files around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GlmOcrForConditionalGeneration

from random_glmocr import CHAT_TEMPLATE, SPECIAL_TOKENS
from training.canvas import MAX_TOKENS, MIN_TOKENS
from training.folder import byte_names, write
from training.glmocr.architecture import DECODER_LAYERS, configuration
from training.glmocr.forward import GlmReader
from training.glmocr.prompt import ENDOFTEXT, GLMOCR, NAMES, USER

PREFIX = f"model.language_model.layers.{DECODER_LAYERS}."
# What the draft head has of its own in a published file, though here it is the decoder's.
SHARED = {
    "embed_tokens.weight": "model.language_model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def load(folder: Path) -> GlmReader:
    """Load a checkpoint folder in fp32, its draft head too."""
    reader = GlmReader(GlmOcrForConditionalGeneration.from_pretrained(folder, dtype=torch.float32))
    stored = {
        _inner(name.removeprefix(PREFIX)): weight.float()
        for name, weight in load_file(folder / "model.safetensors").items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in SHARED
    }
    reader.draft.load_state_dict(stored)
    return reader


def save(reader: GlmReader, folder: Path) -> None:
    """Write a whole checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(reader.model.state_dict())
    weights |= {PREFIX + _outer(name): weight for name, weight in reader.draft.state_dict().items()}
    weights |= {PREFIX + name: weights[source] for name, source in SHARED.items()}
    stored: dict[str, Tensor] = {
        name: weight.detach().to(torch.bfloat16).clone().contiguous() for name, weight in weights.items()
    }
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write(folder / "config.json", configuration())
    write(folder / "generation_config.json", _generation())
    write(folder / "preprocessor_config.json", _preprocessor())
    write(folder / "tokenizer_config.json", _tokenizer_settings())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _tokenizer().save(str(folder / "tokenizer.json"), pretty=False)


def _outer(name: str) -> str:
    """Give the name in the file of one of `DraftHead`'s tensors: the block's stand beside the others."""
    return f"shared_head.{name}" if name.startswith("norm.") else name.removeprefix("block.")


def _inner(name: str) -> str:
    own = ("enorm.", "hnorm.", "eh_proj.")
    if name.startswith("shared_head."):
        return name.removeprefix("shared_head.")
    return name if name.startswith(own) else f"block.{name}"


def _tokenizer() -> Tokenizer:
    built = Tokenizer(models.BPE(vocab=byte_names(), merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    for name in NAMES:
        token = AddedToken(name, special=name in SPECIAL_TOKENS, normalized=False)
        _ = built.add_special_tokens([token]) if name in SPECIAL_TOKENS else built.add_tokens([token])
    return built


def _generation() -> dict[str, Any]:
    return {"do_sample": False, "eos_token_id": [ENDOFTEXT, USER], "pad_token_id": ENDOFTEXT}


def _preprocessor() -> dict[str, Any]:
    # The stock processor counts a still picture as two frames.
    area = 2 * GLMOCR.unit**2
    return {
        "do_rescale": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Glm46VImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": GLMOCR.unit // 2,
        "processor_class": "Glm46VProcessor",
        "size": {"longest_edge": MAX_TOKENS * area, "shortest_edge": MIN_TOKENS * area},
        "temporal_patch_size": 2,
    }


def _tokenizer_settings() -> dict[str, Any]:
    return {
        "added_tokens_decoder": {
            str(256 + index): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": name in SPECIAL_TOKENS,
            }
            for index, name in enumerate(NAMES)
        },
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
