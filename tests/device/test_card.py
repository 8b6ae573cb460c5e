"""What only a card can show, beside what must hold on every device; `make gpu-check` runs it there."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from kaminari_core.cache import StaticCache
from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.decode import DecodeCore
from kaminari_core.fit.cases import make_case
from kaminari_core.fit.measured import allocation_peak, serve_once
from kaminari_core.fit.plan import make_plan
from kaminari_core.flow import Request
from kaminari_core.progress import silent
from kaminari_core.quantization.layouts import AtenLayout
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.scheme import Scheme, quantize
from kaminari_core.registry import load_registry
from kaminari_core.testing import TinyModel
from tests.conftest import turn

DEVICE = os.environ.get("KAMINARI_TEST_DEVICE", "cpu")
CUDA = DEVICE.startswith("cuda")
on_a_card = pytest.mark.skipif(not CUDA, reason="only a card can tell")


def test_pictures_lie_where_a_card_takes_them_in_one_copy() -> None:
    model = TinyModel(EngineConfig(device=DEVICE, max_length=512))
    [patches] = model.prepare(Request((turn("user", (128, 128), "read"),))).patches
    assert patches.values.is_pinned() is CUDA
    assert patches.values.is_contiguous()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_quantized_product_is_the_formula(bits: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(256, 512, generator=generator)
    codes = quantize(weight, Scheme(bits))
    layer = QuantizedLinear(512, 256, Scheme(bits))
    layer.place(0, codes, torch.device(DEVICE), torch.bfloat16)
    x = torch.randn(rows, 512, generator=generator).to(DEVICE, torch.bfloat16)
    expected = F.linear(x.float().cpu(), codes.dequantize())
    assert torch.linalg.vector_norm(layer(x).float().cpu() - expected) < 0.02 * torch.linalg.vector_norm(expected)
    if CUDA and bits == 4:
        assert isinstance(layer.layout, AtenLayout)


@on_a_card
def test_a_captured_step_never_waits_for_the_card() -> None:
    model = TinyModel(EngineConfig(device=DEVICE, max_length=512))
    core = DecodeCore(model, StaticCache(model.shape, 2, 512, model.device, model.dtype), compile=True)
    core.warm_up(lambda *_: None)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for at in (5, 300):
            core.step([[1], [2]], [[at], [at]], [[at], [at]])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(core._graphs) == len(core.buckets)


@on_a_card
@pytest.mark.parametrize("package", ["qwen3vl", "glmocr"])
def test_serving_stays_within_the_plan(package: str) -> None:
    spec, folder = resolve(load_registry(only=frozenset({"core", package})), package, "tiny")
    config = EngineConfig(device=DEVICE, dtype="bfloat16", visual_tokens=256, max_length=1024, slots=2, compile=False)
    device = torch.device(DEVICE)
    model = spec.load()(folder, config, device, silent)
    prepared = model.prepare(Request((turn("user", (700, 500), "x " * 200),)))

    def serve() -> None:
        serve_once(model, StaticCache(model.shape, 2, 1024, device, model.dtype), prepared, chunk=config.prefill_chunk)

    serve()
    plan = make_plan(make_case(spec, folder, config, "cuda"), config)
    # The work space of the matrix library is taken from the allocator, too.
    reserve = 1.1 * plan.group("cache", "work") + plan.group("reserve")
    assert allocation_peak(serve, device) <= reserve + 64 * 2**20
