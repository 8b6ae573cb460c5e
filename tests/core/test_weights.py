"""The streaming loader: every place a tensor can go, and every way a checkpoint can be wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kaminari_core.errors import CheckpointError
from kaminari_core.weights import INDEX_FILE, SINGLE_FILE, Rule, load_weights

CPU = torch.device("cpu")
RULES = [
    Rule(r"tok\.weight", "embed.weight"),
    Rule(r"head\.weight", "head.weight"),
    Rule(r"q\.weight", "qkv.weight", rows=(0, 6)),
    Rule(r"k\.weight", "qkv.weight", rows=(6, 8)),
    Rule(r"v\.weight", "qkv.weight", rows=(8, 10)),
    Rule(r"experts", "experts", transposed=True),
    Rule(r"norm(\d)\.weight", r"norms.\1.weight"),
]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.qkv = nn.Linear(4, 10, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 2, 4))
        self.norms = nn.ModuleList(nn.RMSNorm(4) for _ in range(2))


def tensors(*without: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {
        "tok.weight": torch.randn(5, 4),
        "head.weight": torch.randn(5, 4),
        "q.weight": torch.randn(6, 4),
        "k.weight": torch.randn(2, 4),
        "v.weight": torch.randn(2, 4),
        "experts": torch.randn(3, 4, 2),
        "norm0.weight": torch.randn(4),
        "norm1.weight": torch.randn(4),
    }
    return {name: tensor for name, tensor in made.items() if name not in without}


def write(folder: Path, values: dict[str, Tensor]) -> Path:
    save_file(values, folder / SINGLE_FILE)
    return folder


def write_sharded(folder: Path, values: dict[str, Tensor]) -> Path:
    names = list(values)
    weight_map = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        part = names[number::3]
        save_file({name: values[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Module:
    with torch.device("meta"):
        module = Module()
    load_weights(module, folder, RULES, device=CPU, dtype=dtype, **options)
    return module


@pytest.mark.parametrize("layout", [write, write_sharded])
def test_every_tensor_finds_its_place(tmp_path: Path, layout: Any) -> None:
    values = tensors()
    module = load(layout(tmp_path, values))
    assert torch.equal(module.embed.weight, values["tok.weight"])
    assert torch.equal(module.head.weight, values["head.weight"])
    assert torch.equal(module.qkv.weight, torch.cat([values[f"{name}.weight"] for name in "qkv"]))
    assert torch.equal(module.experts, values["experts"].transpose(1, 2))
    assert torch.equal(module.norms[1].weight, values["norm1.weight"])
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_long_tensors_are_copied_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tensors()
    whole = load(write(tmp_path, values)).state_dict()
    monkeypatch.setattr("kaminari_core.weights._RUN_BYTES", 40)
    monkeypatch.setattr("kaminari_core.weights._MAPPED_BYTES", 100)
    for name, tensor in load(tmp_path).state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_transposed_tensor_may_stand_the_right_way_round(tmp_path: Path) -> None:
    values = tensors()
    values["experts"] = values["experts"].transpose(1, 2).contiguous()
    assert torch.equal(load(write(tmp_path, values)).experts, values["experts"])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_converted(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    values = {name: tensor.to(stored) for name, tensor in tensors().items()}
    module = load(write(tmp_path, values), dtype)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert torch.equal(module.qkv.weight[:6], values["q.weight"].to(dtype))


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load(write(tmp_path, tensors()), progress=lambda *call: calls.append(call))
    size = sum(tensor.nbytes for tensor in tensors().values())
    assert calls[-1] == ("weights", size, size)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


TIES = {"head.weight": "embed.weight"}


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    module = load(write(tmp_path, tensors("head.weight")), ties=TIES)
    assert module.head.weight is module.embed.weight


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 tensors are missing from it: head\.weight"):
        load(write(tmp_path, tensors("head.weight")))


def test_equal_copies_of_tied_tensors_are_shared(tmp_path: Path) -> None:
    values = tensors()
    values["head.weight"] = values["tok.weight"].clone()
    module = load(write(tmp_path, values), ties=TIES)
    assert module.head.weight is module.embed.weight


def test_different_tied_tensors_are_kept_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = tensors()
    with caplog.at_level(logging.WARNING):
        module = load(write(tmp_path, values), ties=TIES)
    assert torch.equal(module.head.weight, values["head.weight"])
    assert torch.equal(module.embed.weight, values["tok.weight"])
    assert "ties head.weight to embed.weight" in caplog.text


def test_missing_embedding_is_not_excused_by_a_tie(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing from it: embed\.weight, head\.weight"):
        load(write(tmp_path, tensors("tok.weight", "head.weight")), ties=TIES)


def test_part_of_a_fused_tensor_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing from it: qkv\.weight"):
        load(write(tmp_path, tensors("k.weight")))


def test_unexpected_tensors_are_named_and_counted(tmp_path: Path) -> None:
    extra = {f"extra{number}": torch.zeros(1) for number in range(8)}
    with pytest.raises(CheckpointError, match=r"8 tensors are in it .*: extra0, extra1, .* and 3 more"):
        load(write(tmp_path, tensors() | extra))


def test_tensor_of_a_layer_that_the_model_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not have: norm2\.weight"):
        load(write(tmp_path, tensors() | {"norm2.weight": torch.zeros(4)}))


def test_ignored_tensors_are_skipped(tmp_path: Path) -> None:
    load(write(tmp_path, tensors() | {"extra.weight": torch.zeros(1)}), ignore=[r"extra\..+"])


def test_wrong_shape_names_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"q\.weight is \[5, 4\], but the model has \[6, 4\]"):
        load(write(tmp_path, tensors() | {"q.weight": torch.zeros(5, 4)}))


def test_scalar_in_place_of_a_matrix(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tok\.weight is \[\], but the model has \[5, 4\]"):
        load(write(tmp_path, tensors() | {"tok.weight": torch.tensor(1.0)}))


def test_integers_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tok\.weight is I8, but must be one of"):
        load(write(tmp_path, tensors() | {"tok.weight": torch.zeros(5, 4, dtype=torch.int8)}))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    values = tensors("norm0.weight") | {"extra": torch.zeros(1), "tok.weight": torch.zeros(5, 3)}
    with pytest.raises(CheckpointError) as caught:
        load(write(tmp_path, values))
    for name in ("norms.0.weight", "extra", "tok.weight is [5, 3]"):
        assert name in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0not json"])
def test_garbage_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete"):
        load(tmp_path)


def test_truncated_file_is_noticed(tmp_path: Path) -> None:
    file = write(tmp_path, tensors()) / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete"):
        load(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors .* found: pytorch_model\.bin"):
        load(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, tensors())
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-1\.safetensors that are missing"):
        load(tmp_path)


def test_index_that_places_a_tensor_elsewhere(tmp_path: Path) -> None:
    write_sharded(tmp_path, tensors())
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["norm7.weight"] = "model-0.safetensors"
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"do not have them: norm7\.weight \(model-0\.safetensors\)"):
        load(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_sharded(tmp_path, tensors())
    save_file({"tok.weight": torch.zeros(5, 4), **tensors()}, tmp_path / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"is in both .*model-0\.safetensors and .*model-1\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


def test_buffer_left_on_meta_is_a_broken_invariant(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Module()
        module.register_buffer("table", torch.empty(3), persistent=False)
    with pytest.raises(AssertionError, match="table"):
        load_weights(module, write(tmp_path, tensors()), RULES, device=CPU, dtype=torch.float32)
