"""What a packed checkpoint directory says about itself: `quantized.json`, and whether its files belong together.

A packed directory is an ordinary checkpoint directory with three files that this package wrote:

    model.safetensors       every tensor that was not converted, byte for byte as in the source
    quantized.safetensors   three tensors for each converted one: NAME.codes, NAME.scales, NAME.zeros
    quantized.json          the manifest: which is which, checksums, and what it was made from

Nothing here imports torch: names, shapes and sizes are asked for before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kaminari_core.errors import CheckpointError
from kaminari_core.headers import TensorHeader, few, read_header, read_json, read_metadata

MANIFEST = "quantized.json"
SIDECAR = "quantized.safetensors"
KEPT = "model.safetensors"
FORMAT = "kaminari-quantized"
METHOD = "kaminari"
"""The `quant_method` of a packed directory's config.json."""
VERSION = 1
"""Of the format. A reader takes its own version and no other."""
FINGERPRINT = "kaminari_source"
"""The key of both tensor files' metadata that holds the fingerprint of the source."""
PARTS = ("codes", "scales", "zeros")
_SCALE_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that was packed.

    `fingerprint` is the SHA-256 over name, type, shape and SHA-256 of every tensor of it, in the order of names; `bytes` the size
    of its tensor files; `format` what its weights were: `full`, or the public format that was repacked.
    """

    fingerprint: str
    bytes: int
    format: str


@dataclass(frozen=True, slots=True)
class Stored:
    """One converted weight (N, K): its scheme, the SHA-256 of each of its three tensors, and how far it is from the original.

    `error` is the relative error of the weight in the Frobenius norm, `output_error` that of the layer's output on calibration
    pages; both None where they are not known.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    sha256: Mapping[str, str]
    error: float | None = None
    output_error: float | None = None

    def part_shape(self, part: str) -> tuple[int, int]:
        """The shape of one of its three tensors."""
        rows, columns = self.shape
        if part == "codes":
            return rows, columns // 2 if self.bits == 4 else columns
        return rows, columns // self.group


@dataclass(frozen=True, slots=True)
class Manifest:
    """`quantized.json`: the converted weights by their name in the source checkpoint, and the names of everything else."""

    quantizer: str
    scale: str
    kaminari: str
    source: Origin
    kept: tuple[str, ...]
    tensors: Mapping[str, Stored]

    def write(self, directory: Path) -> None:
        """Write the file."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        (directory / MANIFEST).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def is_packed(directory: Path) -> bool:
    """Whether a directory is a packed one, complete or not."""
    return (directory / MANIFEST).is_file() or (directory / SIDECAR).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a packed directory. Raises CheckpointError when it is missing, damaged or of another version."""
    if not (directory / MANIFEST).is_file():
        raise CheckpointError(f"{directory} has {SIDECAR} but no {MANIFEST}; quantize the checkpoint again")
    values, where = read_json(directory, MANIFEST), directory / MANIFEST
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{where} has the format {values.get('format')!r}, which must be {FORMAT!r}")
    if values.get("version") != VERSION:
        raise CheckpointError(
            f"{where} has the format version {values.get('version')!r}, this version of kaminari reads {VERSION}; "
            "quantize the checkpoint again"
        )
    try:
        return Manifest(
            quantizer=_text(values["quantizer"]),
            scale=_text(values["scale"]),
            kaminari=_text(values["kaminari"]),
            source=Origin(**values["source"]),
            kept=tuple(_text(name) for name in values["kept"]),
            tensors={name: _stored(entry) for name, entry in values["tensors"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged ({type(error).__name__}: {error}); quantize again") from error


def check_files(directory: Path, manifest: Manifest) -> dict[str, TensorHeader]:
    """The header of the sidecar, once everything that headers can tell agrees with the manifest. Raises CheckpointError."""
    for name in (KEPT, SIDECAR):
        if not (directory / name).is_file():
            raise CheckpointError(f"the packed checkpoint {directory} has no {name}; quantize the checkpoint again")
    sidecar = read_header(directory / SIDECAR)
    for name in (KEPT, SIDECAR):
        found = read_metadata(directory / name).get(FINGERPRINT)
        if found != manifest.source.fingerprint:
            raise CheckpointError(
                f"{name} of {directory} was made from another checkpoint than {MANIFEST} (fingerprint {found or 'none'}, "
                f"must be {manifest.source.fingerprint}); quantize the checkpoint again"
            )
    _check_names(directory, KEPT, set(read_header(directory / KEPT)), set(manifest.kept))
    wanted = {f"{name}.{part}" for name in manifest.tensors for part in PARTS}
    _check_names(directory, SIDECAR, set(sidecar), wanted)
    for name, stored in manifest.tensors.items():
        for part in PARTS:
            _check_part(directory, sidecar[f"{name}.{part}"], stored.part_shape(part), part)
    return sidecar


def _check_names(directory: Path, file: str, found: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise CheckpointError(f"{file} of {directory} lacks {few(missing)}, which {MANIFEST} lists; quantize again")
    if extra := sorted(found - wanted):
        raise CheckpointError(f"{file} of {directory} has {few(extra)}, which {MANIFEST} does not list; quantize again")


def _check_part(directory: Path, header: TensorHeader, shape: tuple[int, int], part: str) -> None:
    types = _SCALE_TYPES if part == "scales" else ("U8",)
    if header.shape != shape or header.dtype not in types:
        raise CheckpointError(
            f"{header.name} in {SIDECAR} of {directory} is {header.dtype} {list(header.shape)}, but {MANIFEST} describes "
            f"{' or '.join(types)} {list(shape)}; quantize again"
        )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} must be a string")
    return value


def _stored(entry: Mapping[str, Any]) -> Stored:
    rows, columns = (int(size) for size in entry["shape"])
    stored = Stored(
        shape=(rows, columns),
        bits=int(entry["bits"]),
        group=int(entry["group"]),
        sha256={part: _text(entry["sha256"][part]) for part in PARTS},
        error=entry.get("error"),
        output_error=entry.get("output_error"),
    )
    if stored.bits not in (4, 8) or stored.group < 2 or columns % stored.group:
        raise ValueError(f"no scheme of {stored.bits} bits in groups of {stored.group} over {columns} columns")
    return stored
