"""The plan against published figures, against arithmetic, and against what the engine really allocates."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.decode import SHORTEST_BUCKET, doubling
from kaminari_core.errors import PromptTooLongError, UsageError
from kaminari_core.fit import plan as plans
from kaminari_core.fit.cases import make_case, published
from kaminari_core.fit.measured import allocation_peak, serve_once
from kaminari_core.fit.plan import make_plan
from kaminari_core.flow import ImagePart, Message, Prepared, Request, TextPart
from kaminari_core.progress import silent
from kaminari_core.protocols import Model
from kaminari_core.registry import Registry
from tests.conftest import png
from tests.fit.conftest import KINDS

GIB = 2**30
CPU = torch.device("cpu")


@pytest.mark.parametrize(("quantizer", "published_gib"), [("none", 4.2), ("int4", 2.3)])
def test_figures_published_for_a_card_of_6_gb(registry: Registry, quantizer: str, published_gib: float) -> None:
    # Qwen3-VL-2B on an RTX 3050: the peak of torch's allocator in bfloat16, and with int4 decoder layers, 1,024 KV tokens.
    spec = registry.model("qwen3vl")
    config = EngineConfig(slots=1, max_length=1024, quantizer=quantizer)
    plan = make_plan(make_case(spec, published(spec, "2b"), config, "cuda"), config)
    assert plan.allocated / GIB == pytest.approx(published_gib, rel=0.03)
    assert plan.total / GIB < 6


def test_the_parts_by_arithmetic(registry: Registry) -> None:
    spec = registry.model("qwen3vl")
    config = EngineConfig(slots=2, max_length=2048, visual_tokens=1024, quantizer="int4")
    plan = make_plan(make_case(spec, published(spec, "2b"), config, "cuda", head="int8"), config)
    parts = {(part.group, part.name): part.bytes for part in plan.parts}
    assert parts["cache", "keys and values"] == 28 * 2 * 8 * 128 * 2 * 2 * 2049
    assert parts["weights", "vision tower"] == 406_957_056 * 2
    assert parts["weights", "embeddings"] == 151_936 * 2048 * 2
    # A tied head that is quantized has its own codes: a byte a weight, and 4 bytes for 64 of them.
    assert parts["weights", "head"] == 151_936 * 2048 * 17 // 16
    linear = 28 * (2048 * 2048 * 2 + 2048 * 1024 * 2 + 3 * 2048 * 6144)
    norms = 28 * (2 * 2048 + 2 * 128) + 2048
    assert parts["weights", "decoder"] == linear // 2 + linear // 64 * 4 + norms * 2
    assert plan.case.weights.converted == 28 * 7 + 1
    assert plan.total == plan.allocated + plan.group("reserve", "process")


def test_what_grows_with_what(registry: Registry) -> None:
    spec = registry.model("qwen3vl")
    base = EngineConfig(slots=2, max_length=2048)
    case = make_case(spec, published(spec, "4b"), base, "cuda")

    def total(**changes: int) -> int:
        return make_plan(case, dataclasses.replace(base, **changes)).total  # type: ignore[arg-type]

    assert total(slots=3) > total() + 147_456 * 2048
    assert total(max_length=4096) > total() + 147_456 * 2048 * 2
    assert total(visual_tokens=2048) > total()
    assert total(visual_tokens=2048, page_tokens=512) == total()
    # No slot is longer than the model's longest sequence.
    assert total(max_length=10**9) == total(max_length=262_144)


def test_a_draft_head_counts_when_it_is_used(registry: Registry) -> None:
    spec = registry.model("glmocr")
    without, with_it = (
        make_plan(make_case(spec, published(spec, "glm-ocr"), config, "cuda"), config)
        for config in (EngineConfig(draft="none"), EngineConfig(draft="mtp"))
    )
    assert with_it.case.weights.total - without.case.weights.total == 217_852_416 * 2
    assert with_it.token_bytes == without.token_bytes * 17 // 16


def test_bucket_sizes_are_those_of_the_decode_core() -> None:
    assert plans.SHORTEST_BUCKET == SHORTEST_BUCKET
    for first, last in ((1, 1), (1, 6), (256, 100), (256, 4096)):
        assert plans._doubling(first, last) == doubling(first, last)


def test_a_quantizer_of_unknown_size_is_told(registry: Registry) -> None:
    spec = registry.model("qwen3vl")
    with pytest.raises(UsageError, match="int3"):
        make_case(spec, published(spec, "2b"), EngineConfig(quantizer="int3"), "cuda")


def test_files_that_are_not_what_config_json_describes_are_noted(
    registry: Registry, random_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = random_checkpoints["tiny"]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    [note] = make_case(registry.model("qwen3vl"), tmp_path, EngineConfig(), "cpu").weights.notes
    assert "layers.2" in note
    assert "11 tensors" in note


def longest_prompt(model: Model, length: int, chunk: int) -> Prepared:
    """A picture of the largest budget, and as many words as the cache has room for."""
    page = ImagePart(png(500, 700), "page")
    for words in range(length, 0, -length // 32):
        try:
            return model.prepare(Request((Message("user", (page, TextPart("x " * words))),)))
        except PromptTooLongError:
            continue
    raise AssertionError("not even the picture fits")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["tiny", "tiny-glmocr"])
def test_planned_against_allocated(
    registry: Registry, random_checkpoints: dict[str, Path], kind: str, dtype: str
) -> None:
    spec, folder = registry.model(KINDS[kind]), random_checkpoints[kind]
    config = EngineConfig(
        device="cpu", dtype=dtype, visual_tokens=256, max_length=1024, slots=3, prefill_chunk=256, compile=False
    )
    model: Model = spec.load()(folder, config, CPU, silent)
    prepared = longest_prompt(model, config.max_length, config.prefill_chunk)

    def serve() -> None:
        cache = StaticCache(model.shape, config.slots, config.max_length, CPU, model.dtype)
        serve_once(model, cache, prepared, chunk=config.prefill_chunk)

    plan = make_plan(make_case(spec, folder, config, "cpu"), config)
    phases = {name: size for name, size in plan.phases.items() if name != "loading"}
    planned = plan.group("cache") + max(phases.values())
    measured = allocation_peak(serve, CPU)
    assert 0.9 * measured < planned < 1.1 * measured
