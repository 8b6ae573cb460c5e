"""Which layers a model offers, and that a model package of somebody else's gets packed checkpoints by loading as it does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kaminari_core.config import EngineConfig
from kaminari_core.progress import silent
from kaminari_core.quantization.linear import QuantizedLinear
from kaminari_core.quantization.packing import Order, pack
from kaminari_core.quantization.scheme import Scheme, quantize
from kaminari_core.quantization.selection import targets
from kaminari_core.quantization.source import open_source
from kaminari_core.quantization.weight_only import int4, int8
from kaminari_core.specs import ModelSpec
from kaminari_core.weights import Rule, fused, load_weights
from tests.quantization.conftest import CPU, manifest

DOCS = Path(__file__).parent.parent.parent / "docs"


class Mixer(nn.Module):
    """A block of a model that nobody here knows, with a bias, and a layer that must stay as it is."""

    quantizable = ("joined", "out")

    def __init__(self) -> None:
        super().__init__()
        self.joined, self.out, self.gate = nn.Linear(64, 96, bias=True), nn.Linear(32, 64, bias=False), nn.Linear(64, 4)
        self.turned = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.joined(x).chunk(3, dim=-1)
        mixed: Tensor = self.out(a * b + c + self.turned(x))
        return mixed * self.gate(x).sum(-1, keepdim=True)


class Network(nn.Module):
    quantizable_heads = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 64)
        self.mixer = Mixer()
        self.head = nn.Linear(64, 40, bias=False)


RULES = [
    Rule(r"words", "words.weight"),
    Rule(r"head\.weight", "head.weight"),
    *fused(r"mix\.{}\.weight", "mixer.joined.weight", a=32, b=32, c=32),
    Rule(r"mix\.bias", "mixer.joined.bias"),
    Rule(r"mix\.(out|gate)\.(weight|bias)", r"mixer.\1.\2"),
    Rule(r"mix\.turned", "mixer.turned.weight", transposed=True),
]


class Loaded:
    """As a model package keeps its network."""

    def __init__(self, network: Network) -> None:
        self.network = network


def load(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Any, **options: Any) -> Loaded:
    """The target of a plugin's spec. Nothing in it is about quantization."""
    with torch.device("meta"):
        network = Network()
    ties = {"head.weight": "words.weight"}
    load_weights(
        network, checkpoint, RULES, device=device, dtype=torch.float32, ties=ties, layout=config.kernels, **options
    )
    return Loaded(network)


SPEC = ModelSpec(name="mixer", target=f"{__name__}:load", model_types=("mixer",))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("mixer")
    (folder / "config.json").write_text(json.dumps({"model_type": "mixer"}))
    shapes = {f"mix.{name}.weight": (32, 64) for name in "abc"} | {"words": (40, 64), "mix.turned": (64, 32)}
    shapes |= {"mix.bias": (96,), "mix.out.weight": (64, 32), "mix.gate.weight": (4, 64), "mix.gate.bias": (4,)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def test_layers_are_found_by_what_their_modules_name(checkpoint: Path) -> None:
    model = load(checkpoint, EngineConfig(), torch.device("meta"), silent)
    assert all(parameter.is_meta for parameter in model.network.parameters())
    found = {
        target.layer: [(source.name, source.first_row) for source in target.sources]
        for target in targets(model, heads=True)
    }
    assert found.pop("head") == [("head.weight", 0)]
    assert {name: sorted(sources, key=lambda source: source[1]) for name, sources in found.items()} == {
        "mixer.joined": [("mix.a.weight", 0), ("mix.b.weight", 32), ("mix.c.weight", 64)],
        "mixer.out": [("mix.out.weight", 0)],
    }
    assert "head" not in {target.layer for target in targets(model, heads=False)}


def test_a_weight_that_stands_transposed_stays(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mixer, "quantizable", ("out", "turned"))
    model = load(checkpoint, EngineConfig(), torch.device("meta"), silent)
    assert {target.layer for target in targets(model, heads=False)} == {"mixer.out"}


def test_a_model_of_somebody_else_computes_with_packed_weights(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    order = Order("int4", int4(), int8(), 32, "rtn")
    pack(SPEC, open_source(checkpoint), out, order, {}, silent)
    assert set(manifest(out)["tensors"]) == {
        "head.weight",
        "mix.a.weight",
        "mix.b.weight",
        "mix.c.weight",
        "mix.out.weight",
    }
    plain = load(checkpoint, EngineConfig(), CPU, silent).network
    packed = load(out, EngineConfig(kernels="plain"), CPU, silent).network
    for name in ("joined", "out"):
        layer, old = packed.mixer.get_submodule(name), plain.mixer.get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        assert isinstance(old, nn.Linear)
        with torch.no_grad():
            old.weight.copy_(quantize(old.weight, Scheme(4, 32)).dequantize())
    assert isinstance(packed.head, QuantizedLinear)
    assert torch.equal(packed.words.weight, plain.words.weight)
    x = torch.randn(5, 64)
    with torch.no_grad():
        torch.testing.assert_close(packed.mixer(x), plain.mixer(x), rtol=1e-4, atol=1e-3)


def test_the_quantizer_in_the_documents_works() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "hooks.md").read_text(encoding="utf-8"), re.M | re.S)
    (example,) = [block for block in blocks if "class Symmetric" in block]
    names: dict[str, Any] = {}
    exec(compile(example, "hooks.md", "exec"), names)
    weight = torch.randn(6, 128)
    make: Callable[[], Any] = names["Symmetric"]
    codes = make().quantize(weight, Scheme(8, 64), "rtn", None)
    assert float((codes.dequantize() - weight).norm() / weight.norm()) < 0.01
    assert set(codes.zeros.flatten().tolist()) == {128}
