"""What a GLM-OCR checkpoint says about itself, read from its own JSON files.

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

MODEL_TYPES = ("glm_ocr",)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The text decoder. `sections` is how many rotary frequencies follow time, height and width; `draft_layers` how many
    multi-token prediction layers come behind the decoder's own."""

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
    draft_layers: int


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


@dataclass(frozen=True, slots=True)
class Config:
    """Everything about one checkpoint but its weights and its vocabulary.

    `markers` are the ids around pictures and of what stands for a video, which only a template may place.
    """

    text: TextConfig
    vision: VisionConfig
    pictures: PictureConfig
    image_token: int
    markers: tuple[int, ...]
    end_tokens: tuple[int, ...]
    sampling: Sampling


def read_config(directory: Path) -> Config:
    """Read a checkpoint's config.json, generation_config.json and preprocessor_config.json.

    Raises CheckpointError for files and keys that are missing, of the wrong type, or describe what is not supported.
    """
    top = read_top(directory, MODEL_TYPES)
    text, vision = read_sizes(directory)
    pictures = read_pictures(directory, frames=True)
    check_patches(
        directory,
        pictures,
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
    )
    end_tokens, sampling = read_generation(directory, top.section("text_config"))
    names = ("image_start", "image_end", "video", "video_start", "video_end")
    markers = tuple(top.get(f"{name}_token_id", int) for name in names)
    return Config(text, vision, pictures, top.get("image_token_id", int), markers, end_tokens, sampling)


def read_sizes(directory: Path) -> tuple[TextConfig, VisionConfig]:
    """The part of `read_config` that config.json alone decides. Raises CheckpointError as it does."""
    top = read_top(directory, MODEL_TYPES)
    return _text(top), _vision(top.section("vision_config"))


def _text(top: Section) -> TextConfig:
    text = top.section("text_config")
    check_decoder(text)
    rope = read_rope(text)
    if rope.optional("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{rope.where} has a partial_rotary_factor, which no GLM-OCR has; only 1.0 is supported")
    head_dim = text.get("head_dim", int)
    return TextConfig(
        hidden=text.get("hidden_size", int),
        intermediate=text.get("intermediate_size", int),
        layers=text.get("num_hidden_layers", int),
        heads=text.get("num_attention_heads", int),
        kv_heads=text.get("num_key_value_heads", int),
        head_dim=head_dim,
        vocabulary=text.get("vocab_size", int),
        max_positions=text.get("max_position_embeddings", int),
        norm_eps=text.get("rms_norm_eps", float),
        rope_theta=rope.get("rope_theta", float),
        sections=read_sections(rope, head_dim),
        # Published files have the flag in the inner section only; the reference takes it from either.
        tied=top.optional("tie_word_embeddings", False) or text.optional("tie_word_embeddings", False),
        draft_layers=text.optional("num_nextn_predict_layers", 0),
    )


def _vision(vision: Section) -> VisionConfig:
    for name in ("depth", "hidden_size", "intermediate_size", "num_heads"):
        vision.get(name, int)
    vision.get("hidden_act", str)
    vision.get("attention_bias", bool)
    vision.get("rms_norm_eps", float)
    return VisionConfig(
        model_type="glm_ocr_vision",
        settings={key: value for key, value in vision.values.items() if key != "model_type"},
        patch_size=vision.get("patch_size", int),
        merge_size=vision.get("spatial_merge_size", int),
        temporal_patch_size=vision.get("temporal_patch_size", int),
        # Published files leave it out: pictures are RGB.
        channels=vision.optional("in_channels", 3),
        out_hidden=vision.get("out_hidden_size", int),
    )
