"""What packing converts, what it leaves as it was, what it says about it, and that a failure leaves nothing behind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kaminari_core.errors import CheckpointError, PluginError, UsageError
from kaminari_core.progress import silent
from kaminari_core.protocols import ScaleSearch
from kaminari_core.quantization.packing import Order, pack
from kaminari_core.quantization.scheme import Codes, Scheme, quantize, unpack_nibbles
from kaminari_core.quantization.source import open_source
from kaminari_core.quantization.weight_only import int4
from kaminari_core.registry import Registry
from tests.quantization.conftest import KINDS, Pack, manifest, tensors

LINEAR = {
    "tiny": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "tiny-untied": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "tiny-moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "tiny-glmocr": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"},
}
"""What each architecture's decoder has; experts are no linear layers."""
LAYERS = {"tiny": 2, "tiny-untied": 2, "tiny-moe": 2, "tiny-glmocr": 3}
"""Decoder layers, GLM-OCR's multi-token prediction layer among them."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoders_linear_layers_are_converted_and_nothing_else(
    folders: dict[str, Path], packed: dict[str, Path], kind: str
) -> None:
    source, kept, listed = tensors(folders[kind]), tensors(packed[kind]), manifest(packed[kind])
    converted = set(listed["tensors"])
    kinds = {name.split(".")[-2] for name in converted}
    assert kinds == LINEAR[kind]
    assert len(converted) == LAYERS[kind] * len(LINEAR[kind])
    assert all(".language_model.layers." in name for name in converted)
    assert set(listed["kept"]) == set(kept) == set(source) - converted
    for name, tensor in kept.items():
        assert tensor.dtype == source[name].dtype
        assert torch.equal(tensor, source[name]), name


@pytest.mark.parametrize("kind", ["tiny", "tiny-glmocr"])
def test_the_sidecar_is_the_formula_of_the_source(folders: dict[str, Path], packed: dict[str, Path], kind: str) -> None:
    source, sidecar = tensors(folders[kind]), load_file(packed[kind] / "quantized.safetensors")
    for name, entry in manifest(packed[kind])["tensors"].items():
        wanted = quantize(source[name], Scheme(4, 32))
        assert (entry["shape"], entry["bits"], entry["group"]) == (list(source[name].shape), 4, 32)
        assert torch.equal(unpack_nibbles(sidecar[f"{name}.codes"]), wanted.codes), name
        assert torch.equal(sidecar[f"{name}.scales"].float(), wanted.scales), name
        assert sidecar[f"{name}.scales"].dtype == torch.bfloat16
        assert torch.equal(sidecar[f"{name}.zeros"], wanted.zeros), name
        error = (wanted.dequantize() - source[name]).norm() / source[name].norm()
        assert entry["error"] == pytest.approx(float(error), rel=1e-4)
        assert entry["output_error"] is None
        for part in ("codes", "scales", "zeros"):
            data = sidecar[f"{name}.{part}"].contiguous().view(torch.uint8).numpy().tobytes()
            assert entry["sha256"][part] == hashlib.sha256(data).hexdigest()


def test_the_other_files_come_along(folders: dict[str, Path], packed: dict[str, Path]) -> None:
    names = {file.name for file in packed["tiny"].iterdir()}
    small = {file.name for file in folders["tiny"].iterdir() if file.suffix != ".safetensors"}
    assert names == small | {"model.safetensors", "quantized.safetensors", "quantized.json"}
    for name in small - {"config.json"}:
        assert (packed["tiny"] / name).read_bytes() == (folders["tiny"] / name).read_bytes()
    config = json.loads((packed["tiny"] / "config.json").read_text(encoding="utf-8"))
    assert config.pop("quantization_config") == {"quant_method": "kaminari", "quantizer": "int4"}
    assert config == json.loads((folders["tiny"] / "config.json").read_text(encoding="utf-8"))


def test_a_tied_head_is_converted_beside_its_embedding(folders: dict[str, Path], packed: dict[str, Path]) -> None:
    source, listed = tensors(folders["tiny"]), manifest(packed["tiny+head"])
    embedding = "model.language_model.embed_tokens.weight"
    assert "lm_head.weight" not in source
    assert listed["tensors"]["lm_head.weight"]["bits"] == 8
    assert torch.equal(tensors(packed["tiny+head"])[embedding], source[embedding])
    sidecar = load_file(packed["tiny+head"] / "quantized.safetensors")
    assert torch.equal(sidecar["lm_head.weight.codes"], quantize(source[embedding], Scheme(8, 32)).codes)


def test_heads_of_their_own_are_converted_the_draft_heads_too(packed: dict[str, Path]) -> None:
    for kind, names in (
        ("tiny-untied+head", {"lm_head.weight"}),
        ("tiny-glmocr+head", {"lm_head.weight", "model.language_model.layers.2.shared_head.head.weight"}),
    ):
        found = {name for name, entry in manifest(packed[kind])["tensors"].items() if entry["bits"] == 8}
        assert found == names
        assert names.isdisjoint(tensors(packed[kind]))


def test_the_same_source_in_other_shards_has_the_same_fingerprint(
    folders: dict[str, Path], packed: dict[str, Path], packer: Pack, tmp_path: Path
) -> None:
    source = tensors(folders["tiny"])
    for file in folders["tiny"].iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    names = sorted(source, reverse=True)
    half = {name: source[name] for name in names[:40]}
    rest = {name: source[name] for name in names[40:]}
    index = {"weight_map": dict.fromkeys(half, "a.safetensors") | dict.fromkeys(rest, "b.safetensors")}
    save_file(half, tmp_path / "a.safetensors")
    save_file(rest, tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(str(index).replace("'", '"'))
    packer(tmp_path, tmp_path / "packed")
    assert not (tmp_path / "packed" / "model.safetensors.index.json").exists()
    assert manifest(tmp_path / "packed")["source"] == manifest(packed["tiny"])["source"]


def test_columns_that_make_no_groups_stay(registry: Registry, folders: dict[str, Path], tmp_path: Path) -> None:
    # 96 columns are three groups of 32, and 64 are two, but no number of groups of 128 or 64 both.
    report = pack(
        registry.model("qwen3vl"), open_source(folders["tiny"]), tmp_path / "packed",
        Order("int4", int4(), None, 128, "rtn"), {}, silent,
    )  # fmt: skip
    groups = {stored.shape[1]: stored.group for stored in report.stored.values()}
    assert groups == {64: 64, 128: 128, 96: 32}
    assert report.left == {}


class Failing:
    """Gives codes for the first weights, and then none."""

    bits = 4

    def __init__(self, good: int) -> None:
        self._left = good

    def quantize(self, weight: torch.Tensor, scheme: Scheme, search: ScaleSearch, inputs: torch.Tensor | None) -> Codes:
        self._left -= 1
        codes = quantize(weight, scheme)
        if self._left >= 0:
            return codes
        return Codes(codes.codes, torch.full_like(codes.scales, torch.nan), codes.zeros)


def test_a_failure_leaves_nothing_behind(registry: Registry, folders: dict[str, Path], tmp_path: Path) -> None:
    order = Order("int4", Failing(5), None, 32, "rtn")
    with pytest.raises(PluginError, match=r"returned for model\.language_model\..*scales not all finite and positive"):
        pack(registry.model("qwen3vl"), open_source(folders["tiny"]), tmp_path / "packed", order, {}, silent)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_no_numbers_are_named(packer: Pack, folders: dict[str, Path], tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    for file in folders["tiny"].iterdir():
        (spoiled / file.name).write_bytes(file.read_bytes())
    values = tensors(folders["tiny"])
    values["model.language_model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(values, spoiled / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight of .* holds numbers that are not finite"
    ):
        packer(spoiled, tmp_path / "packed")
    assert [path.name for path in tmp_path.iterdir()] == ["spoiled"]


def test_a_directory_that_is_there_is_left_alone(packer: Pack, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match="mine is there already; choose another --out"):
        packer("tiny", tmp_path / "mine")


def test_what_is_packed_is_not_packed_again(packer: Pack, packed: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is packed already; quantize the checkpoint that it was made from"):
        packer(packed["tiny"], tmp_path / "again")
