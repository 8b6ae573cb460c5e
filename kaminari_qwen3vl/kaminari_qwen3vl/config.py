"""What a Qwen3-VL checkpoint says about itself, read from its own JSON files.

Nothing here has a default that a checkpoint could contradict: the configuration classes of transformers default to sizes and a
rope base that no published checkpoint uses, so a key that is absent is an error naming the file and the key. Both layouts of the
rotary settings are read: `rope_scaling` with `rope_theta` beside it (the published files) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kaminari_core.errors import CheckpointError
from kaminari_core.flow import Sampling
from kaminari_core.weights import read_json

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")

T = TypeVar("T")


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
class PictureConfig:
    """How the checkpoint's processor prepares a picture; `min_tokens` and `max_tokens` bound its visual tokens."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_tokens: int
    max_tokens: int

    @property
    def unit(self) -> int:
        """Side of one visual token in pixels."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True)
class Config:
    """Everything about one checkpoint but its weights and its vocabulary."""

    text: TextConfig
    vision: VisionConfig
    pictures: PictureConfig
    image_token: int
    end_tokens: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class _Section:
    """A JSON object with the place it came from, so that errors can name both."""

    where: str
    values: Mapping[str, Any]

    def get(self, key: str, kind: type[T]) -> T:
        """The value of a key that must be there and of that type; an integer serves as a float."""
        if key not in self.values:
            raise CheckpointError(f"{self.where} has no {key}")
        value = self.values[key]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.where} has {key} = {value!r}, which must be {_KINDS[kind]}")
        return value

    def section(self, key: str) -> _Section:
        """The object under a key that must be there."""
        return _Section(f"{self.where}: {key}", self.get(key, dict))

    def numbers(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """The list under a key that must be there, its items of one type."""
        items = self.get(key, list)
        inner = _Section(self.where, {f"{key}[{index}]": item for index, item in enumerate(items)})
        return tuple(inner.get(name, kind) for name in inner.values)


_KINDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


def read_config(directory: Path) -> Config:
    """Read a checkpoint's config.json, generation_config.json and preprocessor_config.json.

    Raises CheckpointError for files and keys that are missing, of the wrong type, or describe what is not supported.
    """
    top = _Section(str(directory / "config.json"), read_json(directory, "config.json"))
    model_type = top.get("model_type", str)
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{top.where} has model_type {model_type!r}; this package serves {', '.join(MODEL_TYPES)}"
        )
    if top.values.get("quantization_config") is not None:
        raise CheckpointError(f"{top.where} has a quantization_config; use the checkpoint with full-precision weights")
    vision = _vision(top.section("vision_config"), model_type)
    pictures = _pictures(directory)
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        if getattr(vision, name) != getattr(pictures, name):
            raise CheckpointError(
                f"the {name} of {directory} is {getattr(vision, name)} in config.json, but {getattr(pictures, name)} in the "
                "processor's configuration"
            )
    end_tokens, sampling = _generation(directory, top)
    return Config(_text(top, model_type), vision, pictures, top.get("image_token_id", int), end_tokens, sampling)


def _text(top: _Section, model_type: str) -> TextConfig:
    text = top.section("text_config")
    activation = text.get("hidden_act", str)
    if activation != "silu":
        raise CheckpointError(f"{text.where} has hidden_act {activation!r}; only silu is supported")
    if text.get("attention_bias", bool):
        raise CheckpointError(
            f"{text.where} has attention_bias on, which no Qwen3-VL has and this package does not support"
        )
    rope = _rope(text)
    sections = rope.numbers("mrope_section", int)
    head_dim = text.get("head_dim", int)
    if len(sections) != 3 or 2 * sum(sections) != head_dim:
        raise CheckpointError(
            f"{rope.where} has mrope_section {list(sections)}, which must be three parts of {head_dim // 2}"
        )
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
        sections=(sections[0], sections[1], sections[2]),
        # The flag of the whole model; the one in text_config is not what the reference follows. Absent means not tied.
        tied=top.get("tie_word_embeddings", bool) if "tie_word_embeddings" in top.values else False,
        experts=_experts(text, layers) if model_type == "qwen3_vl_moe" else None,
    )


def _rope(text: _Section) -> _Section:
    """The rotary settings in the newer layout, whichever the file has."""
    if text.values.get("rope_parameters") is not None:
        rope = text.section("rope_parameters")
    else:
        old = text.section("rope_scaling")
        rope = _Section(old.where, {"rope_theta": text.get("rope_theta", float), **old.values})
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"{rope.where} has rope type {kind!r}; only the default type is supported")
    if rope.values.get("mrope_interleaved", True) is not True:
        raise CheckpointError(f"{rope.where} has mrope_interleaved off, a layout that Qwen3-VL does not have")
    return rope


def _experts(text: _Section, layers: int) -> ExpertsConfig:
    step = text.get("decoder_sparse_step", int) if "decoder_sparse_step" in text.values else 1
    dense = text.numbers("mlp_only_layers", int) if text.values.get("mlp_only_layers") else ()
    count = "num_experts" if "num_experts" in text.values else "num_local_experts"
    return ExpertsConfig(
        count=text.get(count, int),
        active=text.get("num_experts_per_tok", int),
        intermediate=text.get("moe_intermediate_size", int),
        layers=frozenset(index for index in range(layers) if index not in dense and (index + 1) % step == 0),
    )


def _vision(vision: _Section, model_type: str) -> VisionConfig:
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


def _pictures(directory: Path) -> PictureConfig:
    """From preprocessor_config.json, or from the processor_config.json that transformers 5 writes in its place."""
    if (directory / "preprocessor_config.json").is_file() or not (directory / "processor_config.json").is_file():
        name = "preprocessor_config.json"
        found = _Section(str(directory / name), read_json(directory, name))
    else:
        name = "processor_config.json"
        found = _Section(str(directory / name), read_json(directory, name)).section("image_processor")
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if found.values.get(step, True) is not True:
            raise CheckpointError(
                f"{found.where} has {step} off, which no Qwen3-VL has and this package does not support"
            )
    if "rescale_factor" in found.values and abs(found.get("rescale_factor", float) - 1 / 255) > 1e-9:
        raise CheckpointError(
            f"{found.where} has rescale_factor {found.values['rescale_factor']}; only 1/255 is supported"
        )
    patch_size, merge_size = found.get("patch_size", int), found.get("merge_size", int)
    # Called edges, but they are areas in pixels.
    size = found.section("size")
    unit_area = (patch_size * merge_size) ** 2
    return PictureConfig(
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=found.get("temporal_patch_size", int),
        mean=_channels(found, "image_mean"),
        std=_channels(found, "image_std"),
        min_tokens=max(1, size.get("shortest_edge", int) // unit_area),
        max_tokens=size.get("longest_edge", int) // unit_area,
    )


def _channels(section: _Section, key: str) -> tuple[float, float, float]:
    values = section.numbers(key, float)
    if len(values) != 3:
        raise CheckpointError(f"{section.where} has {key} = {list(values)}, which must be three numbers")
    return values[0], values[1], values[2]


def _generation(directory: Path, top: _Section) -> tuple[tuple[int, ...], Sampling]:
    """The ids that end a reply and the sampling that the checkpoint asks for.

    generation_config.json decides when it is there: its list has an id that config.json does not know.
    """
    name = "generation_config.json"
    if not (directory / name).is_file():
        return _end_tokens(top.section("text_config")), Sampling()
    found = _Section(str(directory / name), read_json(directory, name))
    ends = found if found.values.get("eos_token_id") is not None else top.section("text_config")
    if found.values.get("do_sample") is not True:
        return _end_tokens(ends), Sampling()
    return _end_tokens(ends), Sampling(
        temperature=_optional(found, "temperature", 1.0),
        top_p=_optional(found, "top_p", 1.0),
        top_k=_optional(found, "top_k", 0),
        repetition_penalty=_optional(found, "repetition_penalty", 1.0),
    )


def _optional(section: _Section, key: str, otherwise: T) -> T:
    """The value of a key, or what its absence means."""
    return otherwise if section.values.get(key) is None else section.get(key, type(otherwise))


def _end_tokens(section: _Section) -> tuple[int, ...]:
    if isinstance(section.values.get("eos_token_id"), list):
        return section.numbers("eos_token_id", int)
    return (section.get("eos_token_id", int),)
