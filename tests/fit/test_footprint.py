"""What a package says about a checkpoint is what the classes of transformers make of the same config.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from kaminari_core.fit import Footprint
from kaminari_core.fit.cases import published
from kaminari_core.headers import read_headers
from kaminari_core.registry import Registry
from tests.fit.conftest import KINDS


def footprint(registry: Registry, model: str, folder: Path) -> Footprint:
    found: Footprint = registry.model(model).load_footprint()(folder)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_are_those_of_the_stock_class(
    registry: Registry, random_checkpoints: dict[str, Path], kind: str
) -> None:
    folder = random_checkpoints[kind]
    found = footprint(registry, KINDS[kind], folder)
    stored = {name: header.shape for name, header in read_headers(folder).items()}
    assert {tensor.name: tensor.shape for tensor in found.tensors} == stored


# All counts but the last two are those of the published checkpoints; GLM-OCR's file has 1,325,258,240 numbers.
@pytest.mark.parametrize(
    ("model", "size", "parameters", "vision", "draft", "token_bytes"),
    [
        ("qwen3vl", "2b", 2_127_532_032, 406_957_056, 0, 114_688),
        ("qwen3vl", "4b", 4_437_815_808, 415_347_712, 0, 147_456),
        ("qwen3vl", "8b", 8_767_123_696, 576_388_336, 0, 147_456),
        ("qwen3vl", "32b", 33_357_390_064, 595_266_800, 0, 262_144),
        ("qwen3vl", "30b-a3b", 31_070_754_032, 538_631_408, 0, 98_304),
        ("glmocr", "glm-ocr", 1_107_405_824, 434_120_192, 217_852_416, 65_536),
    ],
)
def test_published_sizes(
    registry: Registry, model: str, size: str, parameters: int, vision: int, draft: int, token_bytes: int
) -> None:
    found = footprint(registry, model, published(registry.model(model), size))
    assert found.parameters == parameters
    assert sum(tensor.elements for tensor in found.tensors if tensor.kind == "vision") == vision
    assert sum(tensor.elements for tensor in found.tensors if tensor.draft) == draft
    assert 2 * found.layers * found.kv_heads * found.head_dim * 2 == token_bytes


def test_every_published_size_of_a_plugin_can_be_asked_about(registry: Registry) -> None:
    sizes = [(spec, size) for spec in registry.models.values() for size in spec.shapes]
    assert len(sizes) == 6
    for spec, size in sizes:
        assert footprint(registry, spec.name, published(spec, size)).picture is not None


def test_config_json_alone_is_enough(registry: Registry, random_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((random_checkpoints["tiny"] / "config.json").read_bytes())
    alone, whole = (footprint(registry, "qwen3vl", folder) for folder in (tmp_path, random_checkpoints["tiny"]))
    assert alone.tensors == whole.tensors
    assert alone.picture is not None
    assert whole.picture is not None
    # What only the processor's file has is said to be unknown, not made up.
    assert (alone.picture.least, alone.picture.most) == (1, None)
    assert whole.picture.least == 4
