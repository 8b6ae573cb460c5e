"""Whether `--quantizer` and the checkpoint directory agree, decided before anything is loaded. Imports no torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from kaminari_core.errors import UsageError
from kaminari_core.quantization.manifest import is_packed, read_manifest


def quantizer_of(directory: Path, wanted: str, model: str) -> str:
    """The quantizer that a checkpoint directory was packed with, or `none`.

    `wanted` is `auto`, `none` or a quantizer's name. Raises UsageError when the directory is something else, with the command
    that makes what is wanted of it for the model called `model`, and CheckpointError for a manifest that cannot be read.
    """
    packed = read_manifest(directory).quantizer if is_packed(directory) else "none"
    if wanted in ("auto", packed):
        return packed
    if wanted == "none":
        raise UsageError(
            f"{directory} is packed with {packed}: its weights in full precision are not in it. Use --quantizer auto, or the "
            "checkpoint that it was made from"
        )
    if packed != "none":
        raise UsageError(
            f"{directory} is packed with {packed}, not with {wanted}. Use --quantizer auto, or quantize the checkpoint that it "
            f"was made from with {wanted}"
        )
    raise UsageError(
        f"{directory} is not quantized, which is a step of its own: run `{command_for(model, directory, wanted)}`, and then use "
        f"--checkpoint {shlex.quote(str(suggested(directory, wanted)))}"
    )


def command_for(model: str, directory: Path, quantizer: str) -> str:
    """The command that packs a checkpoint directory."""
    shown = directory.name if _bundled(directory) else str(directory)
    words = ("kaminari", "quantize", "--model", model, "--checkpoint", shown, "--quantizer", quantizer)
    return shlex.join((*words, "--out", str(suggested(directory, quantizer))))


def suggested(directory: Path, quantizer: str) -> Path:
    """A place for the packed form of a checkpoint: beside it, or in the current directory for one that lies in a package."""
    if _bundled(directory):
        return Path(f"{directory.name}-{quantizer}")
    return directory.with_name(f"{directory.resolve().name}-{quantizer}")


def _bundled(directory: Path) -> bool:
    return (directory.parent / "__init__.py").is_file()
