"""What a decode step costs besides its arithmetic, counted: no Python inside a layer, no wait for the device, fixed addresses,
and the same allocations in every step. These hold on CUDA as they do here; there, they are what lets a step be captured.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from kaminari_core import layers
from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.decode import DecodeCore
from kaminari_core.layer_call import run_layer
from kaminari_core.layers import Decoder
from kaminari_core.progress import silent
from kaminari_core.protocols import Cache, Model, Step
from kaminari_core.rope import half_split_table, inverse_frequencies
from kaminari_core.testing import VOCABULARY, TinyBlock, TinyModel

LENGTH = 512
ONCE = {"step", "_feed", "bucket", "feed", "view", "_run", "_compute", "decode", "step_tables", "attention_mask"}
"""Functions of the core that a step may run in Python once, however many layers there are."""


def deep(layer_count: int) -> TinyModel:
    """The tiny model with another number of layers."""
    model = TinyModel(EngineConfig(max_length=LENGTH))
    model.shape = replace(model.shape, layers=layer_count)
    decoder = Decoder(
        [TinyBlock() for _ in range(layer_count)], vocabulary=VOCABULARY, hidden=64, norm_eps=1e-6,
        axes=[0] * 16, table=half_split_table, group=2,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in decoder.parameters():
            nn.init.normal_(parameter, std=0.1)
    decoder.requires_grad_(False).set_rotary(inverse_frequencies(32, 10_000.0), LENGTH, model.dtype)
    model.decoder = decoder
    return model


def core_of(model: TinyModel, *, compile: bool, slots: int = 1) -> DecodeCore:
    return DecodeCore(model, StaticCache(model.shape, slots, LENGTH, model.device, model.dtype), compile=compile)


def stepping(core: DecodeCore, at: int = 5) -> Callable[[], object]:
    """A step of one row whose cursor is `at`."""
    return lambda: core.step([[1]], [[at]], [[at]])


def python_calls(run: Callable[[], object]) -> Counter[str]:
    """The functions of `kaminari_core` that ran in Python, by name."""
    found: Counter[str] = Counter()
    home = str(Path(layers.__file__).parent)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def operator_events(run: Callable[[], object]) -> tuple[Counter[str], list[int]]:
    """How often each operator of torch was called, and every allocation (above zero) and release, in bytes and in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler
    assert results is not None
    assert results.kineto_results is not None
    events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [event.nbytes() for event in events if event.name() == "[memory]"]
    return Counter(event.name() for event in events if event.name().startswith("aten::")), memory


@pytest.fixture(scope="module")
def compiled() -> dict[int, DecodeCore]:
    """Compiled cores of 2 and 4 layers that have run."""
    cores = {count: core_of(deep(count), compile=True) for count in (2, 4)}
    for core in cores.values():
        stepping(core)()
    return cores


def test_no_python_runs_inside_a_layer(compiled: dict[int, DecodeCore]) -> None:
    two, four = (python_calls(stepping(compiled[count])) for count in (2, 4))
    # A layer is one call, straight into compiled code; the rest every step makes once.
    assert four - two == Counter({"__call__": 2})
    assert two.keys() >= ONCE
    assert not {"store", "_project", "prefill"} & two.keys()
    # Eagerly, the same step does run the layers in Python: were the counter blind, the above would hold as well.
    eager = python_calls(stepping(core_of(deep(4), compile=False)))
    assert eager["_project"] == 4


def test_every_layer_is_the_same_operators_and_every_step_the_same_events(compiled: dict[int, DecodeCore]) -> None:
    (two, _), (four, _) = (operator_events(stepping(compiled[count])) for count in (2, 4))
    assert (four - two).total() % 2 == 0
    assert all(count % 2 == 0 for count in (four - two).values())
    assert not two - four
    first, later = (operator_events(stepping(compiled[2], at)) for at in (5, 200))
    assert first == later


def test_a_step_leaves_nothing_allocated_but_its_logits(compiled: dict[int, DecodeCore]) -> None:
    kept: list[object] = []
    _, memory = operator_events(lambda: kept.append(compiled[2].step([[1]], [[6]], [[6]])))
    assert sum(memory) == VOCABULARY * 4
    assert max(memory) <= 64 * 1024


def test_the_only_copy_of_the_inputs_is_one(compiled: dict[int, DecodeCore]) -> None:
    core = compiled[2]
    inputs = core._inputs[1]
    operators, _ = operator_events(lambda: inputs.feed([[1]], [[5]], [[5]], [], rows=1, spare=core.cache.max_length))
    # One from numbers to the staging buffer, one from there to the device.
    assert operators["aten::copy_"] == 2


def test_addresses_do_not_move(compiled: dict[int, DecodeCore]) -> None:
    core = compiled[2]

    def addresses() -> list[int]:
        step, ends = core._inputs[1].view(core.buckets[0])
        tensors = (step.tokens, step.positions, step.cursors, ends, core.cache.keys, core.cache.values)
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    for at in range(5, 40):
        stepping(core, at)()
        core._inputs[1].clear(core.cache.max_length)
    assert addresses() == before


def test_buckets_are_few_and_steps_within_one_compile_nothing(compiled: dict[int, DecodeCore]) -> None:
    core = compiled[4]
    assert [(bucket.rows, bucket.length) for bucket in core.buckets] == [(1, 256), (1, 512)]
    before = core.compiles
    for at in (0, 1, 100, 254, 255):
        stepping(core, at)()
    assert core.compiles == before == 1
    many = core_of(deep(2), compile=False, slots=8)
    # 1, 2, 4, 8 rows at 256 and 512 positions: growing with the logarithm of both.
    assert len(many.buckets) == 4 * 2


def on_meta(model: Any) -> Model:
    """The model without its numbers: every operator that would have to look at one raises."""
    decoder = model.network.decoder if hasattr(model, "network") else model.decoder
    for module in (decoder, getattr(getattr(model, "network", None), "draft", None)):
        if module is not None:
            module.to("meta")
    decoder._scalar = tuple(table.to("meta") for table in decoder._scalar)
    model.device = torch.device("meta")
    return model  # type: ignore[no-any-return]


def meta_step(rows: int, width: int) -> Step:
    tokens, positions, cursors = torch.zeros(3, rows, width, dtype=torch.int64, device="meta")
    return Step(tokens, positions, cursors, 256)


def meta_cache(model: Model, slots: int, width: int) -> Cache:
    return StaticCache(model.shape, slots, LENGTH, torch.device("meta"), model.dtype, width=width)


def test_a_step_of_the_tiny_model_never_waits_for_the_device() -> None:
    model = on_meta(deep(2))
    assert model.decode(meta_step(2, 1), meta_cache(model, 2, 1), run_layer).shape == (2, 1, VOCABULARY)
    with pytest.raises(NotImplementedError):
        # The proof that it would be noticed.
        torch.zeros(1, device="meta").nonzero().tolist()


@pytest.mark.parametrize("package", ["qwen3vl", "glmocr"])
def test_a_step_of_a_models_package_never_waits_for_the_device(package: str) -> None:
    from kaminari_core.checkpoint import resolve
    from kaminari_core.registry import load_registry

    spec, folder = resolve(load_registry(only=frozenset({"core", package})), package, "tiny")
    drafting = package == "glmocr"
    config = EngineConfig(
        device="cpu", dtype="float32", max_length=LENGTH, compile=False, draft="mtp" if drafting else "none"
    )
    model = on_meta(spec.load()(folder, config, torch.device("cpu"), silent))
    cache = meta_cache(model, 2, 4)
    with torch.inference_mode():
        for width in (1, 4):
            logits = model.decode(meta_step(2, width), cache, run_layer)
            assert logits.shape == (2, width, model.shape.vocabulary)
        if drafting:
            ends = torch.zeros(2, dtype=torch.int64, device="meta")
            guessed = model.draft(meta_step(2, 4), ends, cache, run_layer)  # type: ignore[attr-defined]
            assert guessed.shape == (2, model.shape.vocabulary)
