"""A packed directory computes what its dequantized weights compute, and whatever is wrong with it is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError
from kaminari_core.parity import assert_same
from kaminari_core.placement import checkpoint_bytes
from kaminari_core.progress import silent
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.packing import Order, pack
from kaminari_core.quantization.scheme import Codes, unpack_nibbles
from kaminari_core.quantization.selection import networks
from kaminari_core.quantization.source import open_source
from kaminari_core.quantization.weight_only import int4, int8
from kaminari_core.registry import Registry
from kaminari_core.weights import tensor_names
from tests.quantization.conftest import CPU, KINDS, load, manifest, reply, tensors

HEADS = ["tiny+head", "tiny-untied+head", "tiny-glmocr+head"]


def full_again(packed: Path, out: Path) -> Path:
    """The packed checkpoint written as an ordinary one, by the formula."""
    out.mkdir()
    for file in packed.iterdir():
        if file.suffix != ".safetensors" and file.name != "quantized.json":
            (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    values, sidecar = tensors(packed), load_file(packed / "quantized.safetensors")
    for name, entry in manifest(packed)["tensors"].items():
        codes = sidecar[f"{name}.codes"]
        codes = unpack_nibbles(codes) if entry["bits"] == 4 else codes
        values[name] = Codes(codes, sidecar[f"{name}.scales"].float(), sidecar[f"{name}.zeros"]).dequantize()
    save_file(values, out / "model.safetensors")
    return out


@pytest.mark.parametrize("kind", [*KINDS, *HEADS])
def test_it_computes_what_the_dequantized_weights_compute(
    registry: Registry, packed: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    model = KINDS[kind.removesuffix("+head")]
    ours = load(registry, model, packed[kind])
    theirs = load(registry, model, full_again(packed[kind], tmp_path / "full"))
    found = reply(ours)
    assert_same(found, reply(theirs), tolerance=2e-5)
    assert found.logits is not None
    assert float(found.logits.std()) > 0.1


def test_only_the_layers_that_were_converted_are_swapped(registry: Registry, packed: dict[str, Path]) -> None:
    (network,) = networks(load(registry, "qwen3vl", packed["tiny+head"])).values()
    swapped = {name for name, module in network.named_modules() if isinstance(module, QuantizedLinear)}
    blocks = ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert swapped == {f"decoder.layers.{n}.{name}" for n in range(2) for name in blocks} | {"decoder.lm_head"}
    embedding = network.get_parameter("decoder.embed_tokens.weight")
    assert torch.equal(embedding, tensors(packed["tiny"])["model.language_model.embed_tokens.weight"])


def test_the_draft_head_shares_a_head_of_the_same_codes(
    registry: Registry, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(folders["tiny-glmocr"], tmp_path / "source")
    values = tensors(source)
    head = "model.language_model.layers.2.shared_head.head.weight"
    for name, shared in (("equal", True), ("absent", True), ("other", False)):
        values[head] = values["lm_head.weight"].clone()
        if name == "other":
            values[head][0, 0] += 1
        if name == "absent":
            del values[head]
        save_file(values, source / "model.safetensors")
        order = Order("int4", int4(), int8(), 32, "rtn")
        pack(registry.model("glmocr"), open_source(source), tmp_path / name, order, {}, silent)
        (network,) = networks(load(registry, "glmocr", tmp_path / name, draft="mtp")).values()
        found = network.get_submodule("draft.head")
        assert isinstance(found, QuantizedLinear)
        assert (found is network.get_submodule("decoder.lm_head")) == shared, name


def test_without_the_draft_head_its_converted_layers_are_left_out(registry: Registry, packed: dict[str, Path]) -> None:
    calls: list[tuple[str, int, int]] = []
    load_glmocr = registry.model("glmocr").load()
    config = EngineConfig(device="cpu", dtype="float32", kernels="plain")
    model = load_glmocr(packed["tiny-glmocr"], config, CPU, lambda *call: calls.append(call))
    assert model.network.draft is None
    assert calls[-1][1] == calls[-1][2] > 0
    assert any("layers.2." in name for name in tensor_names(packed["tiny-glmocr"]))


def test_auto_takes_the_precision_of_the_source(packed: dict[str, Path], folders: dict[str, Path]) -> None:
    size = sum(tensor.nbytes for tensor in tensors(folders["tiny"]).values())
    assert checkpoint_bytes(packed["tiny"]) == size


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the manifest."""

    def spoil(folder: Path) -> None:
        values = manifest(folder)
        change(values)
        (folder / "quantized.json").write_text(json.dumps(values))

    return spoil


def rewrite(
    change: Callable[[dict[str, torch.Tensor]], None], *, fingerprint: str | None = None
) -> Callable[[Path], None]:
    """Change the sidecar's tensors."""

    def spoil(folder: Path) -> None:
        file = folder / "quantized.safetensors"
        values = load_file(file)
        change(values)
        found = fingerprint or manifest(folder)["source"]["fingerprint"]
        save_file(values, file, metadata={"format": "pt", "kaminari_source": found})

    return spoil


def cut(name: str, size: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-size])

    return spoil


def flip(folder: Path) -> None:
    data = bytearray((folder / "quantized.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "quantized.safetensors").write_bytes(data)


def only_the_rest(folder: Path) -> None:
    (folder / "quantized.json").unlink()
    (folder / "quantized.safetensors").unlink()


def other_kept(folder: Path) -> None:
    save_file(tensors(folder), folder / "model.safetensors", metadata={"kaminari_source": "f" * 64})


Q = "model.language_model.layers.0.self_attn.q_proj.weight"
PROBLEMS: list[tuple[str, Callable[[Path], object], str]] = [
    ("no manifest", lambda folder: (folder / "quantized.json").unlink(), r"has quantized\.safetensors but no quantized\.json"),
    ("no sidecar", lambda folder: (folder / "quantized.safetensors").unlink(), r"has no quantized\.safetensors"),
    ("nothing but the rest", only_the_rest, r"config\.json has a quantization_config"),
    ("no kept weights", lambda folder: (folder / "model.safetensors").unlink(), r"has no model\.safetensors"),
    ("manifest cut", cut("quantized.json", 50), r"quantized\.json is not a JSON file"),
    ("sidecar cut", cut("quantized.safetensors", 10), r"quantized\.safetensors is incomplete: its header says \d+ bytes"),
    ("sidecar header cut", lambda f: (f / "quantized.safetensors").write_bytes(b"\x10"), "its header cannot be read"),
    ("kept weights cut", cut("model.safetensors", 10), r"model\.safetensors is (incomplete|damaged)"),
    ("a bit", flip, r"\.(codes|scales|zeros) is damaged: its checksum is not the one that quantized\.json has"),
    ("later version", edit(lambda v: v.update(version=2)), "format version 2, this version of kaminari reads 1"),
    ("other format", edit(lambda v: v.update(format="gguf")), "has the format 'gguf', which must be 'kaminari-quantized'"),
    ("no version", edit(lambda v: v.pop("version")), "has the format version None"),
    ("no tensors", edit(lambda v: v.pop("tensors")), r"quantized\.json is damaged \(KeyError: 'tensors'\)"),
    ("a list", edit(lambda v: v.update(tensors=[])), r"quantized\.json is damaged \(AttributeError"),
    ("no bits", edit(lambda v: v["tensors"][Q].pop("bits")), r"quantized\.json is damaged \(KeyError: 'bits'\)"),
    ("3 bits", edit(lambda v: v["tensors"][Q].update(bits=3)), "no scheme of 3 bits in groups of 32 over 64 columns"),
    ("no checksum", edit(lambda v: v["tensors"][Q]["sha256"].pop("codes")), r"damaged \(KeyError: 'codes'\)"),
    ("other scheme", edit(lambda v: v["tensors"][Q].update(bits=8)), r"q_proj\.weight\.codes in quantized\.safetensors"),
    ("other group", edit(lambda v: v["tensors"][Q].update(group=64)), r"describes F32 or F16 or BF16 \[\d+, 1\]"),
    ("other source", edit(lambda v: v["source"].update(fingerprint="0" * 64)), "was made from another checkpoint than"),
    ("another's kept weights", other_kept, r"model\.safetensors of .* was made from another checkpoint than quantized\.json"),
    ("another's sidecar", rewrite(lambda v: None, fingerprint="1" * 64), r"fingerprint 1{64}, must be [0-9a-f]{64}"),
    ("a tensor missing", rewrite(lambda v: v.__delitem__(f"{Q}.zeros")), rf"lacks {Q}\.zeros, which quantized\.json lists"),
    ("a tensor more", rewrite(lambda v: v.update(extra=torch.ones(2))), "has extra, which quantized.json does not list"),
    ("another shape", rewrite(lambda v: v.update({f"{Q}.codes": v[f"{Q}.codes"][:-1]})), r"is U8 \[\d+, 32\], but quantized"),
    ("another type", rewrite(lambda v: v.update({f"{Q}.scales": v[f"{Q}.scales"].to(torch.int16)})), "is I16"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), [row[1:] for row in PROBLEMS], ids=[row[0] for row in PROBLEMS])
def test_what_is_wrong_is_named(
    registry: Registry, packed: dict[str, Path], tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    folder = shutil.copytree(packed["tiny"], tmp_path / "packed")
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load(registry, "qwen3vl", folder)


def test_a_fused_weight_must_be_converted_alike(registry: Registry, packed: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(packed["tiny"], tmp_path / "packed")
    values, listed = load_file(folder / "quantized.safetensors"), manifest(folder)
    kept = tensors(folder) | {Q: torch.zeros(listed["tensors"][Q]["shape"])}
    for part in ("codes", "scales", "zeros"):
        del values[f"{Q}.{part}"]
    del listed["tensors"][Q]
    listed["kept"].append(Q)
    mark = {"kaminari_source": listed["source"]["fingerprint"]}
    save_file(values, folder / "quantized.safetensors", metadata=mark)
    save_file(kept, folder / "model.safetensors", metadata=mark)
    (folder / "quantized.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="are one weight in this model, but not converted alike"):
        load(registry, "qwen3vl", folder)
