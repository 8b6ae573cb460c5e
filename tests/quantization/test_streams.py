"""Files written as a stream are safetensors files, and ranges of rows are read as the library reads them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kaminari_core.errors import CheckpointError
from kaminari_core.headers import read_header, read_metadata
from kaminari_core.quantization import streams
from kaminari_core.quantization.streams import StreamWriter, as_bytes, chunks, read_rows, read_tensor, row_ranges

TENSORS = {
    "weight": torch.arange(24, dtype=torch.float32).view(6, 4),
    "half": torch.randn(3, 5, 2).to(torch.bfloat16),
    "codes": torch.arange(256, dtype=torch.uint8).view(8, 32),
    "words": torch.arange(-4, 4, dtype=torch.int32),
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4),
}


def test_the_library_reads_what_was_streamed(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    with StreamWriter(file, [*TENSORS, "pieces"]) as writer:
        digests = {name: writer.add_tensor(name, tensor) for name, tensor in TENSORS.items()}
        pieces = iter([as_bytes(TENSORS["weight"][:2]), as_bytes(TENSORS["weight"][2:])])
        digests["pieces"] = writer.add("pieces", "F32", (6, 4), pieces)
        writer.finish({"format": "pt", "key": "value"})
    found = load_file(file)
    assert found.keys() == TENSORS.keys() | {"pieces"}
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert torch.equal(found["pieces"], TENSORS["weight"])
    assert digests["pieces"] == digests["weight"] == hashlib.sha256(TENSORS["weight"].numpy().tobytes()).hexdigest()
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == read_metadata(file) == {"format": "pt", "key": "value"}


def test_a_hole_reads_as_zeros_and_takes_its_place(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    with StreamWriter(file, ["a", "b", "c"]) as writer:
        writer.skip("a", "BF16", (1000, 1000))
        writer.add_tensor("b", TENSORS["weight"])
        writer.skip("c", "F32", (2, 2))
        writer.finish({})
    found = load_file(file)
    assert not found["a"].any()
    assert found["a"].shape == (1000, 1000)
    assert torch.equal(found["b"], TENSORS["weight"])
    assert found["c"].shape == (2, 2)


def test_rows_are_read_as_the_library_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    save_file(TENSORS, file)
    headers = read_header(file)
    for name in ("weight", "half", "codes", "words"):
        assert torch.equal(read_rows(headers[name], 1, 3), TENSORS[name][1:3])
        assert torch.equal(read_tensor(headers[name]), TENSORS[name])
    monkeypatch.setattr(streams, "CHUNK_BYTES", 100)
    assert b"".join(chunks(headers["codes"])) == TENSORS["codes"].numpy().tobytes()
    assert [stop - start for start, stop in row_ranges(70, 10, multiple=4)] == [8] * 8 + [6]
    assert list(row_ranges(3, 1000)) == [(0, 1), (1, 2), (2, 3)]


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(TENSORS, file)
    header = read_header(file)["codes"]
    file.write_bytes(file.read_bytes()[: header.offset + 100])
    with pytest.raises(CheckpointError, match=r"a\.safetensors ends within codes"):
        read_tensor(header)
