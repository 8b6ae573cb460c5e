"""Tensors read and written a few rows at a time, so that packing and loading take little more memory than one layer.

The safetensors library maps whole files, whose pages count as memory of the process, and writes a file from tensors that are all
there at once. This reads ranges of rows with plain reads, and writes a file whose header is filled in behind the data. The
format: eight bytes of header length, the header as JSON padded with spaces, then the tensors without gaps
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from kaminari_core.errors import CheckpointError
from kaminari_core.headers import ITEM_BYTES, TensorHeader

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    }
)  # fmt: skip
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
CHUNK_BYTES = 32 * 2**20
"""How much of a tensor is in memory at a time."""
_SLACK = 256
_LONGEST_ENTRY = 120


def read_bytes(header: TensorHeader, start: int, stop: int) -> bytearray:
    """Bytes [start, stop) of a tensor. Raises CheckpointError for a file that ends before."""
    taken = bytearray(stop - start)
    try:
        with header.file.open("rb", buffering=0) as stream:
            stream.seek(header.offset + start)
            done, view = 0, memoryview(taken)
            while done < len(taken):
                count = stream.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{header.file} ends within {header.name}; it is incomplete")
                done += count
    except OSError as error:
        raise CheckpointError(f"{header.name} cannot be read from {header.file}: {error}") from error
    return taken


def read_rows(header: TensorHeader, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a tensor, in a copy of its own. Raises CheckpointError as `read_bytes` does."""
    width = header.bytes // header.shape[0]
    taken = read_bytes(header, start * width, stop * width)
    return torch.frombuffer(taken, dtype=DTYPES[header.dtype]).view(stop - start, *header.shape[1:])


def read_tensor(header: TensorHeader) -> Tensor:
    """A whole tensor. Raises CheckpointError as `read_bytes` does."""
    return torch.frombuffer(read_bytes(header, 0, header.bytes), dtype=DTYPES[header.dtype]).view(header.shape)


def chunks(header: TensorHeader) -> Iterator[bytearray]:
    """The bytes of a tensor, `CHUNK_BYTES` at a time."""
    for start in range(0, header.bytes, CHUNK_BYTES):
        yield read_bytes(header, start, min(header.bytes, start + CHUNK_BYTES))


def row_ranges(rows: int, row_bytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """[start, stop) over all rows, in steps of about `CHUNK_BYTES` that are multiples of `multiple`."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes) // multiple) * multiple
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class StreamWriter:
    """Writes a safetensors file, one tensor after the other, each in as many pieces as it comes in.

    `names` are those that will be added, for the space that the header needs. The file is complete once `finish` was called.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._space = _SLACK + sum(len(json.dumps(name)) + _LONGEST_ENTRY for name in names)
        self._space += -self._space % 8
        self._stream: BinaryIO = path.open("wb")
        self._stream.seek(8 + self._space)
        self._header: dict[str, dict[str, Any]] = {}
        self._at = 0

    def add(self, name: str, dtype: str, shape: Sequence[int], pieces: Iterator[Any]) -> str:
        """Write one tensor from pieces that make up its bytes; returns their SHA-256."""
        assert name not in self._header, f"{name} is written twice"
        start, digest = self._at, hashlib.sha256()
        for piece in pieces:
            self._stream.write(piece)
            digest.update(piece)
            self._at += len(piece)
        self._header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, self._at]}
        return digest.hexdigest()

    def add_tensor(self, name: str, tensor: Tensor) -> str:
        """Write a tensor that is there at once; returns the SHA-256 of its bytes."""
        return self.add(name, NAMES[tensor.dtype], tensor.shape, iter([as_bytes(tensor)]))

    def skip(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Leave the space of a tensor without writing it; where the file system can, it takes none."""
        start = self._at
        self._at += math.prod(shape) * ITEM_BYTES[dtype]
        self._stream.truncate(8 + self._space + self._at)
        self._stream.seek(0, os.SEEK_END)
        self._header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, self._at]}

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header, and close the file."""
        text = json.dumps({"__metadata__": dict(metadata), **self._header}, separators=(",", ":")).encode()
        assert len(text) <= self._space, "the header needs more space than was left for it"
        self._stream.seek(0)
        self._stream.write(self._space.to_bytes(8, "little") + text.ljust(self._space))
        self.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
