"""Whole checkpoints: every published size has a place for each tensor, and what is wrong with a directory is told."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError
from kaminari_core.flow import Request
from kaminari_core.parity import assert_same, greedy
from kaminari_core.weights import Rule
from kaminari_qwen3vl.config import read_config
from kaminari_qwen3vl.model import Network, Qwen3VL, load
from kaminari_qwen3vl.plugin import kaminari_models
from kaminari_qwen3vl.reference import StockQwen3VL
from kaminari_qwen3vl.reference import load as load_reference
from kaminari_qwen3vl.weights import rules
from scripts.make_random_checkpoint import configuration, tensor_shapes, write_settings, write_tokenizer

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_random_checkpoint.py"


def quiet(*_: object) -> None:
    """Progress that nobody watches."""


# Parameters in millions, and those of the vision tower: what the reference class has, built from the published configurations.
@pytest.mark.parametrize(
    ("size", "total", "vision"),
    [("2b", 2_128, 407), ("4b", 4_438, 415), ("8b", 8_767, 576), ("32b", 33_360, 595), ("30b-a3b", 31_070, 539)],
)
def test_published_sizes_fit_the_network(tmp_path: Path, size: str, total: int, vision: int) -> None:
    ids = write_tokenizer(tmp_path)
    settings = configuration(size, ids, vocabulary=151_936, layers=None)
    write_settings(tmp_path, settings, ids, min_pixels=65_536)
    shapes = tensor_shapes(settings)
    config = read_config(tmp_path)
    with torch.device("meta"):
        network = Network(config, CPU)
    places = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    filled = dict.fromkeys(places, 0)
    for name, shape in shapes.items():
        target, rule = place_of(name, rules(config))
        turned = (shape[0], shape[2], shape[1]) if rule.transposed else shape
        rows = places[target][0] if rule.rows is None else rule.rows[1] - rule.rows[0]
        assert turned == (rows, *places[target][1:]), name
        filled[target] += rows
    left = {name for name, rows in filled.items() if rows != places[name][0]}
    assert left == ({"decoder.lm_head.weight"} if config.text.tied else set())
    count = sum(math.prod(shape) for shape in shapes.values())
    assert count / 1e6 == pytest.approx(total, rel=1e-3)
    assert sum(math.prod(s) for name, s in shapes.items() if "visual" in name) / 1e6 == pytest.approx(vision, abs=0.6)


def place_of(name: str, table: list[Rule]) -> tuple[str, Rule]:
    for rule in table:
        if match := re.fullmatch(rule.pattern, name):
            return match.expand(rule.target), rule
    raise AssertionError(f"no rule for {name}")


def test_script_writes_shards_that_load_and_generate(
    tmp_path: Path, config: EngineConfig, ask: Callable[..., Request]
) -> None:
    command = [
        sys.executable,
        SCRIPT,
        "--size",
        "tiny",
        "--layers",
        "1",
        "--shard-bytes",
        "200000",
        "--out",
        tmp_path / "c",
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert len(list((tmp_path / "c").glob("model-0000*-of-*.safetensors"))) > 2
    model = load(tmp_path / "c", config, CPU, quiet)
    assert model.shape.layers == 1
    assert len(greedy(model, model.prepare(ask((64, 64), "x")), 4).tokens) == 4


def test_untied_head_in_a_tied_checkpoint_is_kept(
    tiny_random: Path, tmp_path: Path, config: EngineConfig, ask: Callable[..., Request]
) -> None:
    folder = tmp_path / "both"
    shutil.copytree(tiny_random, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder, config, CPU, quiet)
    prepared = model.prepare(ask("x"))
    theirs = load_reference(folder, CPU, torch.float32).greedy(prepared, 8, logits=True)
    assert_same(greedy(model, prepared, 8), theirs)


@pytest.mark.parametrize("kind", ["tiny", "tiny-untied", "tiny-moe"])
def test_checkpoint_saved_again_by_transformers_is_the_same(
    checkpoints: dict[str, Path],
    models: dict[str, Qwen3VL],
    tmp_path: Path,
    config: EngineConfig,
    ask: Callable[..., Request],
    kind: str,
) -> None:
    AutoModelForImageTextToText.from_pretrained(checkpoints[kind]).save_pretrained(tmp_path)
    for file in (*checkpoints[kind].glob("tokenizer*"), checkpoints[kind] / "chat_template.jinja"):
        shutil.copy(file, tmp_path)
    AutoImageProcessor.from_pretrained(checkpoints[kind]).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())["text_config"]
    prepared = models[kind].prepare(ask((96, 64), "Read this."))
    again = greedy(load(tmp_path, config, CPU, quiet), prepared, 4)
    assert_same(again, greedy(models[kind], prepared, 4), tolerance=0.0)


@pytest.mark.slow
def test_static_reference_chooses_the_same_tokens(
    references: dict[str, StockQwen3VL], model: Qwen3VL, ask: Callable[..., Request]
) -> None:
    prepared = model.prepare(ask((96, 64), "Read this."))
    dynamic = references["tiny"].greedy(prepared, 12)
    static = references["tiny"].greedy(prepared, 12, mode="static", max_length=128)
    assert static.tokens == dynamic.tokens
    assert min(static.prefill_seconds, static.decode_seconds, dynamic.decode_seconds) > 0


def test_bfloat16_rounds_as_the_reference_does(
    tiny_random: Path, config: EngineConfig, ask: Callable[..., Request]
) -> None:
    model = load(tiny_random, replace(config, dtype="bfloat16"), CPU, quiet)
    prepared = model.prepare(ask((96, 64), "Read this."))
    theirs = load_reference(tiny_random, CPU, torch.bfloat16).greedy(prepared, 1, logits=True)
    assert_same(greedy(model, prepared, 1), theirs, tolerance=0.0625)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("tokenizer.json", "has no tokenizer.json"),
        ("chat_template.jinja", "has no chat_template.json"),
        ("model.safetensors", "neither model.safetensors nor"),
    ],
)
def test_missing_file_is_named(
    tiny_random: Path, tmp_path: Path, config: EngineConfig, file: str, message: str
) -> None:
    folder = tmp_path / "part"
    shutil.copytree(tiny_random, folder)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=message):
        load(folder, config, CPU, quiet)


def test_template_of_older_checkpoints(tiny_random: Path, tmp_path: Path, config: EngineConfig) -> None:
    folder = tmp_path / "old"
    shutil.copytree(tiny_random, folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load(folder, config, CPU, quiet)._processor._template.chat_template == template


@pytest.mark.parametrize("template", ["{% for message in messages %}", "{{ raise_exception('nobody may speak') }}"])
def test_template_that_can_serve_nobody(tiny_random: Path, tmp_path: Path, config: EngineConfig, template: str) -> None:
    folder = tmp_path / "mute"
    shutil.copytree(tiny_random, folder)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match="the model's chat template refuses"):
        load(folder, config, CPU, quiet)


def test_damaged_tokenizer(tiny_random: Path, tmp_path: Path, config: EngineConfig) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_random, folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer of .* cannot be read"):
        load(folder, config, CPU, quiet)


def test_image_token_that_is_no_special_token(tiny_random: Path, tmp_path: Path, config: EngineConfig) -> None:
    folder = tmp_path / "token"
    shutil.copytree(tiny_random, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"image_token_id": 65}))
    with pytest.raises(CheckpointError, match="image_token_id 65 is no added token"):
        load(folder, config, CPU, quiet)


def test_config_of_another_width(tiny_random: Path, tmp_path: Path, config: EngineConfig) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(tiny_random, folder)
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["hidden_size"] = 128
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="output 64 to a decoder of hidden size 128"):
        load(folder, config, CPU, quiet)


def test_plugin_names_what_it_brings() -> None:
    (spec,) = kaminari_models()
    assert spec.load() is load
    assert spec.model_types == ("qwen3_vl", "qwen3_vl_moe")
    assert set(spec.tasks) == {"ocr", "caption", "markdown"}
