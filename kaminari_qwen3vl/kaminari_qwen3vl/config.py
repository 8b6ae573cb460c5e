"""What a Qwen3-VL checkpoint says about itself, read from its own JSON files.

Every size comes from the files; see `kaminari_core.settings` for why. Read beside the same file of another model package, this
one is the list of what the architecture calls its sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaminari_core.errors import CheckpointError
from kaminari_core.flow import Sampling
from kaminari_core.settings import (
    PictureConfig,
    Section,
    check_decoder,
    check_patches,
    read_generation,
    read_pictures,
    read_rope,
    read_sections,
    read_top,
)

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture-of-experts layers: `layers` are the indexes of those that have experts instead of a dense MLP."""

    count: int
    active: int
    intermediate: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The text decoder. `sections` is how many rotary frequencies follow time, height and width."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    sections: tuple[int, int, int]
    tied: bool
    experts: ExpertsConfig | None


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower: what the decoder needs of it, and `settings`, the section of config.json, for the class that runs it."""

    model_type: str
    settings: Mapping[str, Any]
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    channels: int
    out_hidden: int
    deepstack_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Config:
    """Everything about one checkpoint but its weights and its vocabulary."""

    text: TextConfig
    vision: VisionConfig
    pictures: PictureConfig
    image_token: int
    end_tokens: tuple[int, ...]
    sampling: Sampling


def read_config(directory: Path) -> Config:
    """Read a checkpoint's config.json, generation_config.json and preprocessor_config.json.

    Raises CheckpointError for files and keys that are missing, of the wrong type, or describe what is not supported.
    """
    top = read_top(directory, MODEL_TYPES)
    text, vision = read_sizes(directory)
    pictures = read_pictures(directory)
    check_patches(
        directory,
        pictures,
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
    )
    end_tokens, sampling = read_generation(directory, top.section("text_config"))
    return Config(text, vision, pictures, top.get("image_token_id", int), end_tokens, sampling)


def read_sizes(directory: Path) -> tuple[TextConfig, VisionConfig]:
    """The part of `read_config` that config.json alone decides. Raises CheckpointError as it does."""
    top = read_top(directory, MODEL_TYPES)
    model_type = top.get("model_type", str)
    return _text(top, model_type), _vision(top.section("vision_config"), model_type)


def _text(top: Section, model_type: str) -> TextConfig:
    text = top.section("text_config")
    check_decoder(text)
    rope = read_rope(text)
    if not rope.optional("mrope_interleaved", True):
        raise CheckpointError(f"{rope.where} has mrope_interleaved off, a layout that Qwen3-VL does not have")
    head_dim = text.get("head_dim", int)
    layers = text.get("num_hidden_layers", int)
    return TextConfig(
        hidden=text.get("hidden_size", int),
        intermediate=text.get("intermediate_size", int),
        layers=layers,
        heads=text.get("num_attention_heads", int),
        kv_heads=text.get("num_key_value_heads", int),
        head_dim=head_dim,
        vocabulary=text.get("vocab_size", int),
        max_positions=text.get("max_position_embeddings", int),
        norm_eps=text.get("rms_norm_eps", float),
        rope_theta=rope.get("rope_theta", float),
        sections=read_sections(rope, head_dim),
        # The flag of the whole model; the one in text_config is not what the reference follows. Absent means not tied.
        tied=top.optional("tie_word_embeddings", False),
        experts=_experts(text, layers) if model_type == "qwen3_vl_moe" else None,
    )


def _experts(text: Section, layers: int) -> ExpertsConfig:
    step = text.optional("decoder_sparse_step", 1)
    dense = text.numbers("mlp_only_layers", int) if text.values.get("mlp_only_layers") else ()
    count = "num_experts" if "num_experts" in text.values else "num_local_experts"
    return ExpertsConfig(
        count=text.get(count, int),
        active=text.get("num_experts_per_tok", int),
        intermediate=text.get("moe_intermediate_size", int),
        layers=frozenset(index for index in range(layers) if index not in dense and (index + 1) % step == 0),
    )


def _vision(vision: Section, model_type: str) -> VisionConfig:
    for name in ("depth", "hidden_size", "intermediate_size", "num_heads", "num_position_embeddings"):
        vision.get(name, int)
    vision.get("hidden_act", str)
    return VisionConfig(
        model_type=f"{model_type}_vision",
        settings={key: value for key, value in vision.values.items() if key != "model_type"},
        patch_size=vision.get("patch_size", int),
        merge_size=vision.get("spatial_merge_size", int),
        temporal_patch_size=vision.get("temporal_patch_size", int),
        channels=vision.get("in_channels", int),
        out_hidden=vision.get("out_hidden_size", int),
        deepstack_layers=vision.numbers("deepstack_visual_indexes", int),
    )
