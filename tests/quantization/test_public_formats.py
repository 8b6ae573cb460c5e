"""GPTQ, AWQ and compressed-tensors checkpoints are repacked with exactly their weights, and what cannot be is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kaminari_core.errors import CheckpointError, KaminariError
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.scheme import Codes, unpack_nibbles
from kaminari_core.quantization.selection import networks
from kaminari_core.registry import Registry
from tests.quantization.conftest import Pack, load, manifest, reply, tensors
from tests.quantization.public_layouts import (
    Layer,
    awq_layer,
    compressed_layer,
    gptq_layer,
    linear_stems,
    made,
    random_codes,
    write,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def compressed(bits: int = 4, **weights: Any) -> dict[str, Any]:
    """The quantization_config of a pack-quantized checkpoint."""
    described = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "actorder": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": described | weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*visual.*"],
    }  # fmt: skip


FORMATS: dict[str, tuple[dict[str, Any], int, bool, Callable[[Codes], Layer]]] = {
    "gptq": (GPTQ, 4, False, lambda codes: gptq_layer(codes, 4)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, 4, False, lambda codes: gptq_layer(codes, 4, version=2)),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, 8, False, lambda codes: gptq_layer(codes, 8)),
    "awq": (AWQ, 4, False, awq_layer),
    "compressed-tensors": (compressed(), 4, True, lambda codes: compressed_layer(codes, 4)),
    "with packed zeros": (
        compressed(symmetric=False),
        4,
        False,
        lambda c: compressed_layer(c, 4, zero_points="packed"),
    ),
    "with int8 zeros": (compressed(symmetric=False), 4, False, lambda c: compressed_layer(c, 4, zero_points="int8")),
    "compressed-tensors of 8 bits": (compressed(8), 8, True, lambda codes: compressed_layer(codes, 8)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_exactly_those_of_the_source(
    registry: Registry, folders: dict[str, Path], packer: Pack, tmp_path: Path, name: str
) -> None:
    settings, bits, symmetric, layer = FORMATS[name]
    codes, layers = made(folders["tiny"], bits, 32, layer, symmetric=symmetric)
    source = write(folders["tiny"], tmp_path / "public", settings, layers)
    report = packer(source, tmp_path / "packed", bits=bits)
    assert {stored.error for stored in report.stored.values()} == {None}
    sidecar = load_file(tmp_path / "packed" / "quantized.safetensors")
    assert set(manifest(tmp_path / "packed")["tensors"]) == {f"{stem}.weight" for stem in codes}
    for stem, wanted in codes.items():
        found = sidecar[f"{stem}.weight.codes"]
        assert torch.equal(unpack_nibbles(found) if bits == 4 else found, wanted.codes), stem
        assert sidecar[f"{stem}.weight.scales"].dtype == torch.float16
        assert torch.equal(sidecar[f"{stem}.weight.scales"].float(), wanted.scales), stem
        assert torch.equal(sidecar[f"{stem}.weight.zeros"], wanted.zeros), stem
    assert manifest(tmp_path / "packed")["source"]["format"] == settings["quant_method"]
    if name == "awq":
        (network,) = networks(load(registry, "qwen3vl", tmp_path / "packed")).values()
        stems = [f"model.language_model.layers.0.self_attn.{part}_proj" for part in "qkv"]
        fused = network.get_submodule("decoder.layers.0.attention.qkv_proj")
        assert isinstance(fused, QuantizedLinear)
        assert torch.equal(fused.dequantized(), torch.cat([codes[stem].dequantize() for stem in stems]))


def test_a_head_can_be_quantized_beside_repacked_weights(
    registry: Registry, folders: dict[str, Path], packer: Pack, tmp_path: Path
) -> None:
    _, layers = made(folders["tiny"], 4, 32, awq_layer)
    source = write(folders["tiny"], tmp_path / "public", AWQ, layers)
    report = packer(source, tmp_path / "packed", head=8)
    assert report.stored["lm_head.weight"].bits == 8
    logits = reply(load(registry, "qwen3vl", tmp_path / "packed")).logits
    assert logits is not None
    assert bool(logits.isfinite().all())


def test_one_scale_for_a_whole_row_is_split_into_groups(folders: dict[str, Path], packer: Pack, tmp_path: Path) -> None:
    stems = linear_stems(folders["tiny"])
    codes = {stem: random_codes(n, k, 4, k, seed) for seed, (stem, (n, k)) in enumerate(stems.items())}
    layers = {stem: gptq_layer(one, 4) for stem, one in codes.items()}
    source = write(folders["tiny"], tmp_path / "public", GPTQ | {"group_size": -1, "desc_act": True}, layers)
    report = packer(source, tmp_path / "packed")
    assert {stored.group for stored in report.stored.values()} == {32, 64, 128}
    wide = next(stem for stem, (_, columns) in stems.items() if columns == 128)
    assert tensors(tmp_path / "packed").keys().isdisjoint(f"{stem}.weight" for stem in stems)
    found = load_file(tmp_path / "packed" / "quantized.safetensors")
    assert torch.equal(unpack_nibbles(found[f"{wide}.weight.codes"]), codes[wide].codes)
    assert torch.equal(found[f"{wide}.weight.scales"].float(), codes[wide].scales)


def test_what_the_source_left_in_full_precision_stays_so(
    folders: dict[str, Path], packer: Pack, tmp_path: Path
) -> None:
    _, layers = made(folders["tiny"], 4, 32, awq_layer)
    left = {stem for stem in layers if "layers.1.mlp" in stem}
    layers = {stem: layer for stem, layer in layers.items() if stem not in left}
    # Some tools write a bias of zeros for every layer.
    next(iter(layers.values()))["bias"] = torch.zeros(128, dtype=torch.float16)
    settings = AWQ | {"modules_to_not_convert": ["visual", "layers.1.mlp"]}
    source = write(folders["tiny"], tmp_path / "public", settings, layers)
    report = packer(source, tmp_path / "packed")
    assert set(report.left) == {f"{stem}.weight" for stem in left}
    kept = tensors(tmp_path / "packed")
    assert torch.equal(
        kept["model.language_model.layers.1.mlp.up_proj.weight"],
        tensors(folders["tiny"])["model.language_model.layers.1.mlp.up_proj.weight"],
    )


def test_weights_that_the_model_cannot_use_quantized_are_made_full(
    registry: Registry, folders: dict[str, Path], packer: Pack, tmp_path: Path
) -> None:
    codes, layers = made(folders["tiny"], 4, 32, awq_layer)
    stem = "model.visual.blocks.0.attn.proj"
    codes[stem] = random_codes(32, 32, 4, 32, 99)
    source = write(folders["tiny"], tmp_path / "public", AWQ, layers | {stem: awq_layer(codes[stem])})
    report = packer(source, tmp_path / "packed")
    assert report.restored == [f"{stem}.weight"]
    found = tensors(tmp_path / "packed")[f"{stem}.weight"]
    assert torch.equal(found, codes[stem].dequantize(torch.bfloat16))
    load(registry, "qwen3vl", tmp_path / "packed")


def reordered(layer: Layer) -> None:
    layer["g_idx"] = layer["g_idx"].flip(0)


def shorter(layer: Layer) -> None:
    layer["scales"] = layer["scales"][:, :-8]


def without_zeros(layer: Layer) -> None:
    del layer["qzeros"]


def negative(layer: Layer) -> None:
    layer["scales"] = -layer["scales"]


def unchanged(layer: Layer) -> None:
    pass


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        (GPTQ, reordered, r"q_proj\.weight has reordered columns \(act-order, desc_act\)"),
        (GPTQ, shorter, r"scales is \[2, \d+\], but must be \[2, \d+\]"),
        (GPTQ, without_zeros, r"qweight, but no qzeros beside it"),
        (GPTQ, negative, "has scales that are negative or not finite"),
        (GPTQ | {"bits": 3}, unchanged, "describes weights of 3 bits; 4 and 8 are supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, unchanged, "checkpoint_format 'marlin'; only gptq and gptq_v2"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, unchanged, r"settings of their own for \+:\.\*down"),
        (AWQ | {"version": "gemv"}, unchanged, "AWQ version 'gemv' with 4 bits; only gemm"),
        (compressed(strategy="tensor"), unchanged, "strategy 'tensor'"),
        (compressed() | {"format": "marlin-24"}, unchanged, "format 'marlin-24'"),
        (compressed() | {"config_groups": {}}, unchanged, "weights of no bits"),
        ({"quant_method": "bitsandbytes"}, unchanged, "quant_method 'bitsandbytes'; gptq, awq and compressed-tensors"),
        (compressed(), unchanged, "but the checkpoint has no weights packed that way"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_read_is_named(
    folders: dict[str, Path],
    packer: Pack,
    tmp_path: Path,
    settings: dict[str, Any],
    change: Callable[[Layer], None],
    message: str,
) -> None:
    _, layers = made(folders["tiny"], 4, 32, lambda codes: gptq_layer(codes, 4))
    change(layers["model.language_model.layers.0.self_attn.q_proj"])
    source = write(folders["tiny"], tmp_path / "public", settings, layers)
    with pytest.raises(CheckpointError, match=message):
        packer(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_quantized_checkpoint_that_was_not_repacked_is_refused(
    registry: Registry, folders: dict[str, Path], tmp_path: Path
) -> None:
    _, layers = made(folders["tiny"], 4, 32, awq_layer)
    source = write(folders["tiny"], tmp_path / "public", AWQ, layers)
    with pytest.raises(KaminariError, match=r"quantization_config.*kaminari quantize"):
        load(registry, "qwen3vl", source)
