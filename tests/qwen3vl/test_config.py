"""Checkpoint settings: both layouts, nothing from class defaults, and errors that name the file and the key."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kaminari_core.errors import CheckpointError
from kaminari_core.flow import Sampling
from kaminari_qwen3vl.config import read_config

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tiny_random: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint's settings, to be changed."""
    for file in tiny_random.glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


def change(folder: Path, name: str, edit: Change) -> None:
    values = json.loads((folder / name).read_text())
    edit(values)
    (folder / name).write_text(json.dumps(values))


def test_facts_are_those_of_the_files(folder: Path) -> None:
    config = read_config(folder)
    assert (config.text.hidden, config.text.heads, config.text.kv_heads, config.text.head_dim) == (64, 4, 2, 32)
    assert (config.text.rope_theta, config.text.sections, config.text.tied) == (10_000.0, (6, 5, 5), True)
    assert config.vision.deepstack_layers == (0, 1)
    assert (config.pictures.unit, config.pictures.min_tokens, config.pictures.max_tokens) == (32, 4, 16_384)


def test_both_rope_layouts_say_the_same(folder: Path) -> None:
    old = read_config(folder)

    def renew(values: dict[str, Any]) -> None:
        text = values["text_config"]
        text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}

    change(folder, "config.json", renew)
    assert read_config(folder) == old


def test_processor_file_of_transformers_5(folder: Path) -> None:
    old = read_config(folder)
    pictures = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": pictures}))
    assert read_config(folder) == old


def test_end_tokens_and_sampling_come_from_generation_config(folder: Path) -> None:
    config = read_config(folder)
    listed = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert len(listed) == 2
    assert config.end_tokens == tuple(listed)
    assert config.sampling == Sampling(temperature=0.7, top_p=0.8, top_k=20)


def test_end_token_of_config_serves_without_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    config = read_config(folder)
    assert config.end_tokens == (json.loads((folder / "config.json").read_text())["text_config"]["eos_token_id"],)
    assert config.sampling == Sampling()


def test_generation_without_sampling_is_greedy(folder: Path) -> None:
    change(folder, "generation_config.json", lambda values: values.update(do_sample=False))
    assert read_config(folder).sampling == Sampling()


def test_tie_flag_is_the_top_one(folder: Path) -> None:
    change(folder, "config.json", lambda values: values["text_config"].update(tie_word_embeddings=False))
    assert read_config(folder).text.tied
    change(folder, "config.json", lambda values: values.pop("tie_word_embeddings"))
    assert not read_config(folder).text.tied


def test_experts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for file in checkpoints["tiny-moe"].glob("*.json"):
        shutil.copy(file, tmp_path)
    experts = read_config(tmp_path).text.experts
    assert experts is not None
    assert (experts.count, experts.active, experts.intermediate, experts.layers) == (8, 2, 48, {0, 1})
    change(tmp_path, "config.json", lambda values: values["text_config"].update(decoder_sparse_step=2))
    experts = read_config(tmp_path).text.experts
    assert experts is not None
    assert experts.layers == {1}


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "hidden_act", "attention_bias",
    ],
)  # fmt: skip
def test_missing_text_key_is_named(folder: Path, key: str) -> None:
    change(folder, "config.json", lambda values: values["text_config"].pop(key))
    with pytest.raises(CheckpointError, match=rf"config\.json: text_config has no {key}"):
        read_config(folder)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("config.json", lambda v: v.pop("image_token_id"), "has no image_token_id"),
        ("config.json", lambda v: v.pop("vision_config"), "has no vision_config"),
        ("config.json", lambda v: v["vision_config"].pop("depth"), "vision_config has no depth"),
        (
            "config.json",
            lambda v: v["text_config"].update(head_dim="32"),
            "head_dim = '32', which must be a whole number",
        ),
        ("config.json", lambda v: v["text_config"].update(hidden_size=True), "must be a whole number"),
        ("config.json", lambda v: v["text_config"].update(attention_bias=True), "attention_bias"),
        ("config.json", lambda v: v["text_config"].update(hidden_act="gelu"), "only silu"),
        ("config.json", lambda v: v["text_config"]["rope_scaling"].update(mrope_section=[6, 5]), "three parts of 16"),
        ("config.json", lambda v: v["text_config"]["rope_scaling"].update(rope_type="yarn"), "yarn"),
        (
            "config.json",
            lambda v: v["text_config"]["rope_scaling"].update(mrope_interleaved=False),
            "mrope_interleaved",
        ),
        ("config.json", lambda v: v.update(model_type="llama"), "'llama'; this package serves qwen3_vl"),
        ("config.json", lambda v: v.update(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        ("preprocessor_config.json", lambda v: v.pop("size"), "has no size"),
        ("preprocessor_config.json", lambda v: v["size"].pop("longest_edge"), "size has no longest_edge"),
        ("preprocessor_config.json", lambda v: v.update(patch_size=14), "patch_size .* is 16 in config.json, but 14"),
        ("preprocessor_config.json", lambda v: v.update(image_mean=[0.5]), "must be three numbers"),
        ("preprocessor_config.json", lambda v: v.update(do_normalize=False), "has do_normalize off"),
        ("preprocessor_config.json", lambda v: v.update(rescale_factor=1.0), "only 1/255"),
        ("generation_config.json", lambda v: v.update(top_k="20"), "top_k = '20'"),
        ("generation_config.json", lambda v: v.update(eos_token_id=["a"]), r"eos_token_id\[0\] = 'a'"),
    ],
)
def test_unusable_settings_are_named(folder: Path, name: str, edit: Change, message: str) -> None:
    change(folder, name, edit)
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"has no {re.escape(name)}; found: "):
        read_config(folder)


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_damaged_file_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(folder)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        read_config(tmp_path / "nowhere")
