"""Whole checkpoints: the published sizes have a place for each tensor, and what is wrong with a directory is told."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

import kaminari_glmocr
from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError, UsageError
from kaminari_core.flow import Request
from kaminari_core.parity import assert_same, greedy
from kaminari_core.weights import Rule
from kaminari_glmocr.config import read_config
from kaminari_glmocr.model import GlmOcr, Network, load
from kaminari_glmocr.plugin import kaminari_models
from kaminari_glmocr.reference import load as load_reference
from kaminari_glmocr.weights import draft_patterns, rules
from scripts import random_glmocr
from scripts.make_random_checkpoint import tensor_shapes

CPU = torch.device("cpu")
LAYER = "model.language_model.layers.2."


def quiet(*_: object) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def folder(tiny_random: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be changed."""
    shutil.copytree(tiny_random, tmp_path / "copy")
    return tmp_path / "copy"


def change_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("draft", [True, False])
def test_published_sizes_fit_the_network(tmp_path: Path, draft: bool) -> None:
    """The published header has 526 tensors with 1,325,258,240 parameters, 16 and 217,852,416 of them the draft head's."""
    ids = random_glmocr.write_tokenizer(tmp_path)
    settings = random_glmocr.configuration("glmocr", ids, layers=None, draft_head=True)
    random_glmocr.write_settings(tmp_path, settings)
    decoder = tensor_shapes(settings)
    head = random_glmocr.draft_shapes(settings, decoder)
    assert (len(decoder), len(head)) == (510, 16)
    assert sum(math.prod(shape) for shape in head.values()) == 217_852_416
    assert sum(math.prod(shape) for shape in (decoder | head).values()) == 1_325_258_240
    config = read_config(tmp_path)
    with torch.device("meta"):
        network = Network(config, CPU, draft=draft)
    places = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    filled = dict.fromkeys(places, 0)
    for name, shape in (decoder | (head if draft else {})).items():
        target, rule = place_of(name, rules(config, draft=draft))
        rows = places[target][0] if rule.rows is None else rule.rows[1] - rule.rows[0]
        assert shape == (rows, *places[target][1:]), name
        filled[target] += rows
    assert [name for name, rows in filled.items() if rows != places[name][0]] == []
    left_out = [name for name in decoder | head if any(re.fullmatch(each, name) for each in draft_patterns(config))]
    assert left_out == list(head)


def place_of(name: str, table: list[Rule]) -> tuple[str, Rule]:
    for rule in table:
        if match := re.fullmatch(rule.pattern, name):
            return match.expand(rule.target), rule
    raise AssertionError(f"no rule for {name}")


def test_the_draft_head_is_loaded_and_paid_for_only_when_asked_for(
    model: GlmOcr, drafting: GlmOcr, without_head: Path, config: EngineConfig
) -> None:
    assert (model.shape.draft_layers, drafting.shape.draft_layers) == (0, 1)
    assert model.network.draft is None
    caches = [StaticCache(each.shape, 2, 64, CPU, torch.float32, width=4) for each in (model, drafting)]
    assert caches[0].state is None
    assert caches[1].keys.shape[0] == caches[0].keys.shape[0] + 1
    plain = load(without_head, config, CPU, quiet)
    assert plain.shape.draft_layers == 0


def test_no_draft_head_to_use(without_head: Path, folder: Path, config: EngineConfig) -> None:
    wanted = replace(config, draft="mtp")
    with pytest.raises(UsageError, match=r"no draft head .*num_nextn_predict_layers.* use --draft prompt-lookup"):
        load(without_head, wanted, CPU, quiet)
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(LAYER)])
    with pytest.raises(UsageError, match=r"no draft head \(no tensors model\.language_model\.layers\.2\.\*\)"):
        load(folder, wanted, CPU, quiet)
    assert load(folder, config, CPU, quiet).shape.draft_layers == 0


def test_a_draft_head_in_part_is_no_draft_head(folder: Path, config: EngineConfig) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(LAYER + "eh_proj.weight"))
    with pytest.raises(CheckpointError, match=r"1 tensors are missing from it: draft\.eh_proj\.weight"):
        load(folder, replace(config, draft="mtp"), CPU, quiet)


@pytest.mark.parametrize("draft", ["none", "mtp"])
@pytest.mark.parametrize("name", [LAYER + "mlp.router.weight", "model.language_model.layers.3.eh_proj.weight"])
def test_only_the_draft_heads_own_tensors_are_left_out(
    folder: Path, config: EngineConfig, draft: str, name: str
) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(2, 2)}))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(folder, replace(config, draft=draft), CPU, quiet)  # type: ignore[arg-type]


def test_several_prediction_layers_are_not_supported(folder: Path, config: EngineConfig) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["num_nextn_predict_layers"] = 2
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers 2; only 1"):
        load(folder, replace(config, draft="mtp"), CPU, quiet)


def test_copies_of_embedding_and_head_are_shared_when_absent_or_equal(
    folder: Path, config: EngineConfig, drafting: GlmOcr
) -> None:
    head = drafting.network.draft
    assert head is not None
    assert head.embed_tokens.weight is not drafting.network.decoder.embed_tokens.weight

    def leave_out_or_equal(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[LAYER + "embed_tokens.weight"]
        tensors[LAYER + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    change_tensors(folder, leave_out_or_equal)
    network = load(folder, replace(config, draft="mtp"), CPU, quiet).network
    assert network.draft is not None
    assert network.draft.embed_tokens.weight is network.decoder.embed_tokens.weight
    assert network.draft.head.weight is network.decoder.lm_head.weight


def test_a_tied_checkpoint_needs_one_matrix_for_all_four(folder: Path, config: EngineConfig) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    absent = ("lm_head.weight", LAYER + "embed_tokens.weight", LAYER + "shared_head.head.weight")
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in absent])
    network = load(folder, replace(config, draft="mtp"), CPU, quiet).network
    assert network.draft is not None
    matrices = (network.decoder.lm_head, network.draft.embed_tokens, network.draft.head)
    assert all(each.weight is network.decoder.embed_tokens.weight for each in matrices)


def test_checkpoint_saved_again_by_transformers_is_the_same(
    tiny_random: Path, model: GlmOcr, tmp_path: Path, config: EngineConfig, ask: Callable[..., Request]
) -> None:
    AutoModelForImageTextToText.from_pretrained(tiny_random).save_pretrained(tmp_path)
    for file in (*tiny_random.glob("tokenizer*"), tiny_random / "chat_template.jinja"):
        shutil.copy(file, tmp_path)
    AutoImageProcessor.from_pretrained(tiny_random).save_pretrained(tmp_path)
    prepared = model.prepare(ask((96, 64), "Text Recognition:"))
    again = greedy(load(tmp_path, config, CPU, quiet), prepared, 4)
    assert_same(again, greedy(model, prepared, 4), tolerance=0.0)
    # It drops the draft head's tensors and keeps the number in config.json.
    with pytest.raises(UsageError, match="no draft head"):
        load(tmp_path, replace(config, draft="mtp"), CPU, quiet)


def test_bfloat16_rounds_as_the_reference_does(
    tiny_random: Path, config: EngineConfig, ask: Callable[..., Request]
) -> None:
    model = load(tiny_random, replace(config, dtype="bfloat16"), CPU, quiet)
    prepared = model.prepare(ask((96, 64), "Text Recognition:"))
    theirs = load_reference(tiny_random, CPU, torch.bfloat16).greedy(prepared, 1, logits=True)
    assert_same(greedy(model, prepared, 1), theirs, tolerance=0.0625)


def test_config_of_another_width(folder: Path, config: EngineConfig) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["hidden_size"] = 128
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="output 64 to a decoder of hidden size 128"):
        load(folder, config, CPU, quiet)


def test_plugin_names_what_it_brings() -> None:
    (spec,) = kaminari_models()
    assert spec.load() is load
    assert spec.load_reference() is load_reference
    assert spec.model_types == ("glm_ocr",)
    assert set(spec.tasks) == {"ocr", "table", "formula", "extract"}
    # The bundled name belongs into the same change as the folder.
    folder = Path(kaminari_glmocr.__file__).parent / "tiny"
    assert dict(spec.bundled) == ({"tiny": "kaminari_glmocr:tiny"} if folder.is_dir() else {})
