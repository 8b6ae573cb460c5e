"""Weights in memory are what was planned, to the byte where nothing is quantized, and a packed directory is planned as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from kaminari_core.cli import program
from kaminari_core.config import EngineConfig
from kaminari_core.fit.cases import make_case
from kaminari_core.fit.measured import allocation_peak
from kaminari_core.fit.weights import Converted
from kaminari_core.launch import load_model
from kaminari_core.progress import silent
from kaminari_core.quantization.layouts import PlainLayout
from kaminari_core.quantization.scheme import Codes, Scheme
from kaminari_core.registry import Registry
from tests.fit.conftest import KINDS


def weight_bytes(network: nn.Module) -> int:
    """All parameters, and the buffers that quantized layers keep their codes in, each storage once."""
    tensors = [*network.parameters(), *(tensor for tensor in network.buffers() if tensor.dtype != torch.float32)]
    codes = [module for module in network.modules() if type(module).__name__.endswith("Layout")]
    tensors += [tensor for module in codes for tensor in module.buffers()]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(("kind", "draft"), [*((kind, "none") for kind in KINDS), ("tiny-glmocr", "mtp")])
def test_full_weights_to_the_byte(
    registry: Registry, random_checkpoints: dict[str, Path], kind: str, draft: str
) -> None:
    spec, folder = registry.model(KINDS[kind]), random_checkpoints[kind]
    config = EngineConfig(device="cpu", dtype="bfloat16", max_length=512, compile=False, kernels="plain", draft=draft)  # type: ignore[arg-type]
    model, _ = load_model(registry, spec, folder, config, silent)
    assert make_case(spec, folder, config, "cpu").weights.total == weight_bytes(model.network)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("quantizer", "head"), [("int4", "none"), ("int8", "int8")])
def test_a_packed_directory(
    registry: Registry, random_checkpoints: dict[str, Path], tmp_path: Path, quantizer: str, head: str
) -> None:
    source, packed = random_checkpoints["tiny"], tmp_path / "packed"
    command = ["quantize", "--model", str(source), "--quantizer", quantizer, "--head", head, "--scale", "rtn"]
    result = CliRunner().invoke(program(registry), [*command, "--out", str(packed)])
    assert result.exit_code == 0, result.output
    spec, config = (
        registry.model("qwen3vl"),
        EngineConfig(device="cpu", dtype="bfloat16", max_length=512, compile=False),
    )
    weights = make_case(spec, packed, config, "cpu").weights
    assert weights.notes == ()
    # 2 layers of q, k, v, o, gate, up and down.
    assert weights.converted == 14 + (head != "none")
    assert bool(weights.kinds["head"]) is (head != "none")
    model, _ = load_model(registry, spec, packed, config, silent)
    taken = weight_bytes(model.network)  # type: ignore[attr-defined]
    assert 0.99 * taken <= weights.total <= 1.05 * taken
    # What would be, asked of the plain directory, is what is.
    asked = EngineConfig(device="cpu", dtype="bfloat16", quantizer=quantizer)
    assert make_case(spec, source, asked, "cpu", head=head).weights.kinds == weights.kinds


def test_a_weight_without_a_product_of_its_own_is_made_full_in_parts() -> None:
    rows, columns, scheme = 48_000, 512, Scheme(8)
    layout = PlainLayout(rows, columns, scheme, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // scheme.group, generator=generator)
    layout.place(0, Codes(codes, scales, torch.full_like(scales, 128, dtype=torch.uint8)))
    x = torch.randn(2, columns, generator=generator)
    out: list[torch.Tensor] = []
    peak = allocation_peak(lambda: out.append(layout(x)), torch.device("cpu"))
    # On a card, this is what the plan counts for it; whole, it would be half as much again.
    assert peak <= Converted(8, 64).rebuilt((rows, columns), 4, "cuda") + 2 * out[0].nbytes < rows * columns * 3 * 4
    for part in (slice(0, 10), slice(32_760, 32_776), slice(rows - 10, rows)):
        expected = x @ ((codes[part].float() - 128) * scales[part].repeat_interleave(64, dim=1)).T
        torch.testing.assert_close(out[0][:, part], expected, rtol=1e-4, atol=1e-2)
