"""Which tensors a checkpoint directory holds, in one safetensors file or in the shards of an index.

The seam: `headers` reads what sizes need without any library; this goes through the safetensors library, so that whatever is
wrong with a file is found before a weight is loaded from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kaminari_core.errors import CheckpointError
from kaminari_core.headers import few, listing, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the checkpoint, as its file's header describes it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def tensor_files(directory: Path) -> list[Path]:
    """The checkpoint's tensor files: the single file when there is one, else the shards of the index."""
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if not (directory / INDEX_FILE).is_file():
        raise CheckpointError(
            f"the checkpoint {directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; found: {listing(directory)}. "
            "Only the safetensors format is read"
        )
    files = sorted({directory / str(file) for file in _weight_map(directory).values()})
    gone = [file.name for file in files if not file.is_file()]
    if gone:
        raise CheckpointError(
            f"{INDEX_FILE} of {directory} names {few(gone)} that are missing; download the checkpoint again"
        )
    return files


def _weight_map(directory: Path) -> dict[str, str]:
    names = read_json(directory, INDEX_FILE).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{directory / INDEX_FILE} has no weight_map with tensors in it")
    return names


def read_entries(directory: Path) -> dict[str, Entry]:
    """Every tensor by name. Raises CheckpointError for files that are missing or damaged, or disagree with the index."""
    entries: dict[str, Entry] = {}
    for file in tensor_files(directory):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name in entries:
                    raise CheckpointError(
                        f"{name} is in both {entries[name].file} and {file}; one of them does not belong"
                    )
                view = tensors.get_slice(name)
                entries[name] = Entry(name, file, tuple(view.get_shape()), view.get_dtype())
    if not (directory / SINGLE_FILE).is_file():
        lost = [f"{name} ({file})" for name, file in _weight_map(directory).items() if name not in entries]
        if lost:
            raise CheckpointError(
                f"{directory / INDEX_FILE} places tensors in shards that do not have them: {few(lost)}"
            )
    return entries


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open one safetensors file; whatever is wrong with it becomes a CheckpointError that names it."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or incomplete ({error}); download it again") from error
