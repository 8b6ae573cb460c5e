"""What the files of a checkpoint say before a byte of a tensor is read: its JSON files, and the headers of its safetensors files.

The memory plan is made of these alone, in a few milliseconds, so nothing here imports torch or the safetensors library: a header
is eight bytes of length and a JSON object (the format's own description, https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kaminari_core.errors import CheckpointError

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
    | {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
)
"""Bytes of one element, by the format's name of its type."""
LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer ones, too."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One stored tensor: its file, shape, type as the safetensors format names it (`BF16`), and its first byte in the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """What it takes on disk."""
        return self.elements * ITEM_BYTES[self.dtype]


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in one of a checkpoint's files. Raises CheckpointError when it is missing or is not one."""
    path = directory / name
    if not directory.is_dir():
        raise CheckpointError(f"the checkpoint {directory} is not a directory")
    if not path.is_file():
        raise CheckpointError(f"the checkpoint {directory} has no {name}; found: {listing(directory)}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, but must hold an object")
    return value


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Every tensor of the directory's safetensors files by name; empty where there are no such files.

    Raises CheckpointError for a file whose header cannot be read or that is shorter than its header says.
    """
    found: dict[str, TensorHeader] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= read_header(file)
    return found


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file by name. Raises CheckpointError as `read_headers` does."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            text = stream.read(size) if size <= LONGEST_HEADER else b""
        table = json.loads(text)
        entries = {name: entry for name, entry in table.items() if name != "__metadata__"}
        tensors = {name: _tensor(name, file, entry, 8 + size) for name, entry in entries.items()}
        end = 8 + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: its header cannot be read ({error}); download it again") from error
    if file.stat().st_size < end:
        raise CheckpointError(
            f"{file} is incomplete: its header says {end} bytes, it has {file.stat().st_size}; download it again"
        )
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """The free-form metadata of a safetensors file whose header `read_header` accepts; empty where it has none."""
    with file.open("rb") as stream:
        table = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    metadata: dict[str, str] = table.get("__metadata__") or {}
    return metadata


def listing(directory: Path) -> str:
    """The names of a directory's first files, for messages."""
    return few(sorted(path.name for path in directory.iterdir())) or "nothing"


def few(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _tensor(name: str, file: Path, entry: Mapping[str, Any], base: int) -> TensorHeader:
    dtype = str(entry["dtype"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has the unknown type {dtype}")
    return TensorHeader(
        name, file, tuple(int(size) for size in entry["shape"]), dtype, base + int(entry["data_offsets"][0])
    )
