"""Checkpoint settings: nothing from class defaults, the published layout, and errors that name the file and the key."""

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
from kaminari_glmocr.config import read_config

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
    assert (config.text.rope_theta, config.text.sections, config.text.tied) == (10_000.0, (4, 6, 6), False)
    assert config.text.draft_layers == 1
    assert config.vision.channels == 3
    assert config.image_token not in config.markers
    assert len(set(config.markers)) == 5


def test_bounds_of_a_picture_are_half_of_what_the_file_says(folder: Path) -> None:
    """12,544 and 9,633,792 pixels of 28 x 28 a token, counted for two frames: the published file's numbers."""
    pictures = read_config(folder).pictures
    assert (pictures.unit, pictures.min_tokens, pictures.max_tokens) == (28, 8, 6_144)


def test_both_rope_layouts_say_the_same(folder: Path) -> None:
    new = read_config(folder)

    def age(values: dict[str, Any]) -> None:
        text = values["text_config"]
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope.pop("rope_theta")
        text["rope_scaling"] = rope

    change(folder, "config.json", age)
    assert read_config(folder) == new


def test_a_reply_ends_with_the_users_turn(folder: Path) -> None:
    config = read_config(folder)
    ids = {
        entry["content"]: entry["id"] for entry in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    assert config.end_tokens == (ids["<|endoftext|>"], ids["<|user|>"])
    assert config.sampling == Sampling()
    (folder / "generation_config.json").unlink()
    assert read_config(folder) == config


@pytest.mark.parametrize("place", ["top", "text"])
def test_tie_flag_is_taken_from_either_place(folder: Path, place: str) -> None:
    def tie(values: dict[str, Any]) -> None:
        (values if place == "top" else values["text_config"])["tie_word_embeddings"] = True

    change(folder, "config.json", tie)
    assert read_config(folder).text.tied


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias",
    ],
)  # fmt: skip
def test_missing_text_key_is_named(folder: Path, key: str) -> None:
    change(folder, "config.json", lambda values: values["text_config"].pop(key))
    with pytest.raises(CheckpointError, match=rf"config\.json: text_config has no {key}"):
        read_config(folder)


@pytest.mark.parametrize(
    "key",
    [
        "depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size",
        "out_hidden_size", "rms_norm_eps", "attention_bias", "hidden_act",
    ],
)  # fmt: skip
def test_missing_vision_key_is_named(folder: Path, key: str) -> None:
    change(folder, "config.json", lambda values: values["vision_config"].pop(key))
    with pytest.raises(CheckpointError, match=rf"config\.json: vision_config has no {key}"):
        read_config(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.pop("image_token_id"), "has no image_token_id"),
        (lambda v: v.pop("image_start_token_id"), "has no image_start_token_id"),
        (lambda v: v["text_config"].pop("rope_parameters"), "has no rope_scaling"),
        (lambda v: v["text_config"]["rope_parameters"].update(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (lambda v: v["text_config"]["rope_parameters"].update(mrope_section=[8, 12, 12]), "three parts of 16"),
        (lambda v: v["text_config"]["rope_parameters"].pop("rope_theta"), "has no rope_theta"),
        (lambda v: v["text_config"].update(attention_bias=True), "attention_bias"),
        (lambda v: v["vision_config"].update(patch_size=16), "patch_size .* is 16 in config.json, but 14"),
        (lambda v: v.update(model_type="glm4v"), "'glm4v'; this package serves glm_ocr"),
    ],
)
def test_what_is_missing_or_not_supported_is_told(folder: Path, edit: Change, message: str) -> None:
    change(folder, "config.json", edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(folder)
    assert re.search(re.escape(str(folder)), str(caught.value))
