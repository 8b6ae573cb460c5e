"""The checkpoint that is being packed: its tensors by name, whichever way its weights are stored, read a few rows at a time.

What a model package makes of the names is found out by loading it on the device `meta`. A package knows nothing of public
quantized formats, so it is shown a hollow directory instead, in which every quantized weight has its full shape and no data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaminari_core.checkpoint_files import SINGLE_FILE, read_entries, tensor_files
from kaminari_core.errors import CheckpointError, UsageError
from kaminari_core.headers import TensorHeader, read_header, read_json
from kaminari_core.quantization.manifest import is_packed
from kaminari_core.quantization.public_formats import PublicWeight, public_weights
from kaminari_core.quantization.streams import StreamWriter, read_tensor

CONFIG = "config.json"
_SETTINGS = ("quantization_config", "compression_config")
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*")
_LEFT = ("model.safetensors.index.json", "quantize_config.json", "quant_config.json")


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """A checkpoint directory: the tensors stored in full by name, and the quantized weights by the name of the full weight.

    `format` is `full`, or the method of its `quantization_config`; `config` is config.json without that.
    """

    directory: Path
    format: str
    config: Mapping[str, Any]
    full: Mapping[str, TensorHeader]
    quantized: Mapping[str, PublicWeight]

    @property
    def bytes(self) -> int:
        """The size of all its tensors."""
        quantized = sum(header.bytes for weight in self.quantized.values() for header in weight.headers.values())
        return quantized + sum(header.bytes for header in self.full.values())

    def small_files(self) -> list[Path]:
        """The settings, tokenizer and processor files, config.json left out."""
        found = {file for pattern in _COPIED for file in self.directory.glob(pattern) if file.is_file()}
        return sorted(file for file in found if file.name not in (CONFIG, *_LEFT))

    def write_small_files(self, directory: Path, mark: Mapping[str, Any] | None = None) -> None:
        """Copy them, and write config.json as a model that is not quantized has it, or with `mark` as its quantization."""
        for file in self.small_files():
            (directory / file.name).write_bytes(file.read_bytes())
        config = self.config if mark is None else {**self.config, _SETTINGS[0]: mark}
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / CONFIG).write_text(text + "\n", encoding="utf-8")

    def write_hollow(self, directory: Path) -> None:
        """Write a checkpoint of the same names and full shapes whose data is a hole in the file."""
        self.write_small_files(directory)
        shapes = {name: (header.dtype, header.shape) for name, header in self.full.items()}
        shapes |= {name: ("BF16", weight.shape) for name, weight in self.quantized.items()}
        with StreamWriter(directory / SINGLE_FILE, list(shapes)) as writer:
            for name, (dtype, shape) in shapes.items():
                writer.skip(name, dtype, shape)
            writer.finish({"format": "pt"})


def open_source(directory: Path) -> SourceCheckpoint:
    """Open a checkpoint to be packed. Raises CheckpointError for what cannot be read, UsageError for one that is packed."""
    if is_packed(directory):
        raise UsageError(f"{directory} is packed already; quantize the checkpoint that it was made from")
    read_entries(directory)
    headers: dict[str, TensorHeader] = {}
    for file in tensor_files(directory):
        headers |= read_header(file)
    config = read_json(directory, CONFIG)
    settings = next((config[key] for key in _SETTINGS if config.get(key) is not None), None)
    if settings is None:
        return SourceCheckpoint(directory, "full", config, headers, {})
    if not isinstance(settings, dict):
        raise CheckpointError(f"{directory / CONFIG} has a quantization_config that is no object")
    quantized = public_weights(directory / CONFIG, settings, headers)
    taken = {header.name for weight in quantized.values() for header in weight.headers.values()}
    full = {name: header for name, header in headers.items() if name not in taken}
    for name in _empty_biases(full, quantized):
        del full[name]
    cleaned = {key: value for key, value in config.items() if key not in _SETTINGS}
    return SourceCheckpoint(directory, str(settings["quant_method"]), cleaned, full, quantized)


def _empty_biases(full: Mapping[str, TensorHeader], quantized: Iterable[str]) -> list[str]:
    """Biases of nothing but zeros that some tools write for every layer they convert, whether or not the model has one."""
    names = [name.removesuffix("weight") + "bias" for name in quantized]
    return [name for name in names if name in full and not read_tensor(full[name]).any()]


def free_bytes(directory: Path) -> int:
    """What can still be written to the file system of a directory that exists."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
