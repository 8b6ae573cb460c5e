"""The JSON files that come with a checkpoint's weights, read with errors that name the file and the key.

Nothing here has a default that a checkpoint could contradict: the configuration classes of transformers default to sizes that no
published checkpoint uses, so a key that is absent is an error. What an architecture calls its sizes is the model package's
business; what is the same for all of them (how pictures are prepared, what ends a reply, both layouts of the rotary
settings) is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError
from kaminari_core.flow import Sampling
from kaminari_core.headers import read_json
from kaminari_core.quantization.manifest import METHOD, is_packed

if TYPE_CHECKING:
    from kaminari_core.patches import ImageProcessor

T = TypeVar("T")


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

    def processor(self, config: EngineConfig, *, widen: bool = False) -> ImageProcessor:
        """The image processor with these numbers, under an engine's settings; `widen` as in `sizing.exact`."""
        # Not above: sizes are read by the memory plan as well, which needs no pixels and waits for no import.
        from kaminari_core.patches import ImageProcessor

        return ImageProcessor(
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            temporal_patch_size=self.temporal_patch_size,
            mean=self.mean,
            std=self.std,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            config=config,
            widen=widen,
        )


@dataclass(frozen=True, slots=True)
class Section:
    """A JSON object with the place it came from, so that errors can name both."""

    where: str
    values: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path, name: str) -> Section:
        """One of a checkpoint's files. Raises CheckpointError when it is missing or holds no object."""
        return cls(str(directory / name), read_json(directory, name))

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

    def optional(self, key: str, otherwise: T) -> T:
        """The value of a key, or what its absence (or null) means."""
        return otherwise if self.values.get(key) is None else self.get(key, type(otherwise))

    def section(self, key: str) -> Section:
        """The object under a key that must be there."""
        return Section(f"{self.where}: {key}", self.get(key, dict))

    def numbers(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """The list under a key that must be there, its items of one type."""
        items = self.get(key, list)
        inner = Section(self.where, {f"{key}[{index}]": item for index, item in enumerate(items)})
        return tuple(inner.get(name, kind) for name in inner.values)


_KINDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


def read_top(directory: Path, model_types: tuple[str, ...]) -> Section:
    """config.json of a checkpoint that one of `model_types` serves, with weights that are not quantized, or packed by us."""
    top = Section.read(directory, "config.json")
    model_type = top.get("model_type", str)
    if model_type not in model_types:
        raise CheckpointError(
            f"{top.where} has model_type {model_type!r}; this package serves {', '.join(model_types)}"
        )
    settings = top.values.get("quantization_config")
    if settings is not None and not (is_packed(directory) and settings.get("quant_method") == METHOD):
        raise CheckpointError(
            f"{top.where} has a quantization_config. GPTQ, AWQ and compressed-tensors checkpoints are repacked once with "
            f"`kaminari quantize --model {directory} --quantizer int4 --out {directory}-int4`; for any other, use the "
            "checkpoint with full-precision weights"
        )
    return top


def check_decoder(text: Section) -> None:
    """Raise CheckpointError for a decoder with another activation than SiLU, or with biases in its attention."""
    activation = text.get("hidden_act", str)
    if activation != "silu":
        raise CheckpointError(f"{text.where} has hidden_act {activation!r}; only silu is supported")
    if text.get("attention_bias", bool):
        raise CheckpointError(f"{text.where} has attention_bias on, which this package does not support")


def read_rope(text: Section) -> Section:
    """The rotary settings in the layout of transformers 5, whichever the file has: `rope_parameters`, or `rope_scaling` with
    `rope_theta` beside it. Raises CheckpointError for another rope type than the default one."""
    if text.values.get("rope_parameters") is not None:
        rope = text.section("rope_parameters")
    else:
        old = text.section("rope_scaling")
        rope = Section(old.where, {"rope_theta": text.get("rope_theta", float), **old.values})
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"{rope.where} has rope type {kind!r}; only the default type is supported")
    return rope


def read_sections(rope: Section, head_dim: int) -> tuple[int, int, int]:
    """How many rotary frequencies follow time, height and width. Raises CheckpointError unless they are all of head_dim / 2."""
    sections = rope.numbers("mrope_section", int)
    if len(sections) != 3 or 2 * sum(sections) != head_dim:
        raise CheckpointError(
            f"{rope.where} has mrope_section {list(sections)}, which must be three parts of {head_dim // 2}"
        )
    return sections[0], sections[1], sections[2]


def read_limits(directory: Path, *, frames: bool = False) -> tuple[int, int | None]:
    """The fewest and the most visual tokens of one picture; (1, None) for a directory without the processor's configuration."""
    names = ("preprocessor_config.json", "processor_config.json")
    if not any((directory / name).is_file() for name in names):
        return 1, None
    pictures = read_pictures(directory, frames=frames)
    return pictures.min_tokens, pictures.max_tokens


def read_pictures(directory: Path, *, frames: bool = False) -> PictureConfig:
    """From preprocessor_config.json, or from the processor_config.json that transformers 5 writes in its place.

    Its `size` bounds are areas in pixels, though they are called edges. With `frames`, the processor counts a still picture as
    temporal_patch_size frames against them.
    """
    if (directory / "preprocessor_config.json").is_file() or not (directory / "processor_config.json").is_file():
        found = Section.read(directory, "preprocessor_config.json")
    else:
        found = Section.read(directory, "processor_config.json").section("image_processor")
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if found.values.get(step, True) is not True:
            raise CheckpointError(f"{found.where} has {step} off, which this package does not support")
    if "rescale_factor" in found.values and abs(found.get("rescale_factor", float) - 1 / 255) > 1e-9:
        raise CheckpointError(
            f"{found.where} has rescale_factor {found.values['rescale_factor']}; only 1/255 is supported"
        )
    patch_size, merge_size = found.get("patch_size", int), found.get("merge_size", int)
    temporal_patch_size = found.get("temporal_patch_size", int)
    size = found.section("size")
    counted = (patch_size * merge_size) ** 2 * (temporal_patch_size if frames else 1)
    return PictureConfig(
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=temporal_patch_size,
        mean=_channels(found, "image_mean"),
        std=_channels(found, "image_std"),
        min_tokens=max(1, size.get("shortest_edge", int) // counted),
        max_tokens=size.get("longest_edge", int) // counted,
    )


def check_patches(directory: Path, pictures: PictureConfig, **sizes: int) -> None:
    """Raise CheckpointError where the vision tower's sizes in config.json differ from the processor's."""
    for name, size in sizes.items():
        if size != getattr(pictures, name):
            raise CheckpointError(
                f"the {name} of {directory} is {size} in config.json, but {getattr(pictures, name)} in the processor's "
                "configuration"
            )


def read_generation(directory: Path, text: Section) -> tuple[tuple[int, ...], Sampling]:
    """The ids that end a reply and the sampling that the checkpoint asks for.

    generation_config.json decides when it is there: its list may have ids that config.json, whose `text_config` is given, does
    not know.
    """
    name = "generation_config.json"
    if not (directory / name).is_file():
        return _end_tokens(text), Sampling()
    found = Section.read(directory, name)
    ends = found if found.values.get("eos_token_id") is not None else text
    if found.values.get("do_sample") is not True:
        return _end_tokens(ends), Sampling()
    return _end_tokens(ends), Sampling(
        temperature=found.optional("temperature", 1.0),
        top_p=found.optional("top_p", 1.0),
        top_k=found.optional("top_k", 0),
        repetition_penalty=found.optional("repetition_penalty", 1.0),
    )


def _channels(section: Section, key: str) -> tuple[float, float, float]:
    values = section.numbers(key, float)
    if len(values) != 3:
        raise CheckpointError(f"{section.where} has {key} = {list(values)}, which must be three numbers")
    return values[0], values[1], values[2]


def _end_tokens(section: Section) -> tuple[int, ...]:
    if isinstance(section.values.get("eos_token_id"), list):
        return section.numbers("eos_token_id", int)
    return (section.get("eos_token_id", int),)
