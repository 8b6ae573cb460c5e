"""Compiling ahead of time: where graphs are kept, that a second process finds them, and the parts of vision towers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kaminari_core.cache_directory import cache_directory, graph_directory
from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.launch import load_model
from kaminari_core.progress import silent
from kaminari_core.protocols import Model
from kaminari_core.registry import Registry
from kaminari_core.vision import StockTower, run_block
from kaminari_core.vision_parts import Part, compile_winners, keep, record_file, tower_of

EAGER = EngineConfig(compile=False, device="cpu", max_length=256)
VARIABLES = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
KAMINARI = str(Path(sys.executable).with_name("kaminari"))


@pytest.fixture(scope="module", params=["qwen3vl", "glmocr"])
def loaded(request: pytest.FixtureRequest, registry: Registry) -> tuple[str, Model]:
    """Each model's bundled reader."""
    return request.param, load_model(registry, *resolve(registry, request.param, "tiny"), EAGER, silent)[0]


def tower(model: Model) -> StockTower:
    found = tower_of(model)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KAMINARI_CACHE_DIR": "/somewhere", "XDG_CACHE_HOME": "/x"}, Path("/somewhere")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/kaminari")),
        ({}, Path.home() / ".cache" / "kaminari"),
        ({"KAMINARI_CACHE_DIR": ""}, Path.home() / ".cache" / "kaminari"),
    ],
)
def test_the_directory_is_the_users_or_what_a_variable_names(environment: dict[str, str], expected: Path) -> None:
    assert cache_directory(environment) == expected


def test_graphs_of_another_torch_or_processor_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    here = graph_directory(Path("/c"))
    assert torch.__version__ in here.name
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    assert graph_directory(Path("/c")) != here


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "{cache}/graphs/torch-"), ({"TORCHINDUCTOR_CACHE_DIR": "/tmp/theirs"}, "/tmp/theirs")],
)
def test_the_compiler_is_told_where_unless_the_user_has(given: dict[str, str], expected: str, tmp_path: Path) -> None:
    code = "from kaminari_core.cache_directory import keep_graphs; print(keep_graphs())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**VARIABLES, "KAMINARI_CACHE_DIR": str(tmp_path), **given},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(expected.format(cache=tmp_path))
    if not given:
        assert Path(done.stdout.strip()).stat().st_mode & 0o077 == 0


def test_a_dense_tower_computes_what_the_stock_class_computes(loaded: tuple[str, Model]) -> None:
    ours = tower(loaded[1])
    from transformers import AutoModel

    stock = AutoModel.from_config(ours.tower.config, attn_implementation="sdpa").eval()
    embedding = stock.patch_embed
    stock.patch_embed = type(ours.tower.patch_embed).of(embedding.proj)
    missing = stock.load_state_dict(ours.tower.state_dict(), strict=False)
    assert missing.unexpected_keys == []
    for tokens in (4, 25):
        patches = ours.picture(tokens)
        grid = torch.tensor([patches.grid])
        with torch.inference_mode():
            expected = stock(patches.values, grid_thw=grid, return_dict=True).pooler_output
            found = ours.tower(patches.values, grid_thw=grid, return_dict=True).pooler_output
        assert expected.shape[0] == tokens
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_won_is_remembered_for_this_machine_alone(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAMINARI_CACHE_DIR", str(tmp_path))
    model = load_model(registry, *resolve(registry, "qwen3vl", "tiny"), EAGER, silent)[0]
    config = EngineConfig(device="cpu")
    file = record_file(model, "qwen3vl")
    assert file.is_relative_to(tmp_path)
    assert compile_winners(model, "qwen3vl", config) == []
    keep(file, [Part("blocks", 2, 1.0, 0.8, 5.0, 1.0), Part("merger", 1, 1.0, 0.99, 5.0, 1.0)])
    for eager in (EngineConfig(compile_vision="off"), EngineConfig(compile=False)):
        assert compile_winners(model, "qwen3vl", eager) == []
    blocks = tower(model).parts()["blocks"]
    assert all(block.call is run_block for block in blocks)
    # Nothing is compiled before the tower is first used.
    assert compile_winners(model, "qwen3vl", config) == ["blocks"]
    assert len({id(block.call) for block in blocks}) == 1
    assert blocks[0].call is not run_block
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "torch": "1.0"}), encoding="utf-8")
    assert compile_winners(model, "qwen3vl", config) == []
    assert compile_winners(model, "qwen3vl", EngineConfig(compile_vision="on")) == ["blocks"]


def test_a_graph_pays_after_its_cost_over_its_gain() -> None:
    part = Part("blocks", 24, eager=2.0, compiled=1.5, cold=10.0, warm=1.0)
    assert part.wins
    assert (part.break_even(part.cold), part.break_even(part.warm)) == (20.0, 2.0)
    loser = Part("merger", 1, eager=2.0, compiled=1.98, cold=10.0, warm=1.0)
    assert not loser.wins
    assert loser.break_even(loser.cold) == float("inf")


def test_settings_of_the_tower_are_checked() -> None:
    with pytest.raises(UsageError, match="compile-vision is 'yes'"):
        EngineConfig(compile_vision="yes")  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_graph_serves_every_block_and_every_size(loaded: tuple[str, Model]) -> None:
    from torch._dynamo.utils import counters

    ours = tower(loaded[1])
    with torch.inference_mode():
        expected = [
            ours.tower(p.values, grid_thw=torch.tensor([p.grid])).pooler_output for p in map(ours.picture, (4, 25, 64))
        ]
        ours.compile_part("blocks")
        counters.clear()
        for tokens, each in zip((4, 25, 64), expected, strict=True):
            p = ours.picture(tokens)
            found = ours.tower(p.values, grid_thw=torch.tensor([p.grid])).pooler_output
            torch.testing.assert_close(found, each, atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    def run(*options: str) -> dict[str, Any]:
        command = [
            KAMINARI,
            "compile",
            "--model",
            "qwen3vl",
            "--checkpoint",
            "tiny",
            "--slots",
            "1",
            "--max-length",
            "256",
        ]
        done = subprocess.run(
            [*command, "--json", *options],
            env={**VARIABLES, "KAMINARI_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    found = run("--compile-vision", "on")
    first, second = found["starts"]
    assert first["compiled"] == second["found"] > 1
    assert first["found"] == second["compiled"] == 0
    assert Path(found["directory"]).is_relative_to(tmp_path)
    again = run("--compile-vision", "on", "--clear")
    assert again["starts"][0]["compiled"] == first["compiled"]
