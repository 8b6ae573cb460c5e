"""Ports that are broken in the classic ways: each check fails, and says which way it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kaminari_core.check import ConformanceError, cases
from kaminari_core.cli import program
from kaminari_core.registry import Registry
from tests.check.conftest import POINTS, only_quantizer, registry_of

Check = Callable[..., Result]


@pytest.fixture
def check(registry: Registry, folders: dict[str, Path]) -> Check:
    """Runs `kaminari check` on some items of a model."""

    def run(model: str, folder: str, *items: str) -> Result:
        only = [word for item in items for word in ("--only", item)]
        return CliRunner().invoke(
            program(registry),
            ["check", "--model", model, "--checkpoint", str(folders[folder]), "--steps", "8", *only],
        )

    return run


@pytest.mark.parametrize(
    ("model", "folder", "bug"),
    [
        ("rotation", "tiny", "rotation style (pairwise here, half-split in the reference)"),
        ("sections", "tiny", "section layout (contiguous here, interleaved in the reference)"),
        ("delta", "tiny", "positions without delta"),
        ("cursor", "tiny", "positions without delta: decode rotates by the cursor"),
        ("deepstack", "tiny", "deepstack omitted: config.json takes features from blocks [0, 1]"),
        ("dropped", "tiny", "deepstack omitted: embed hands the features over"),
        ("reversed_deepstack", "tiny", "deepstack features in the wrong order"),
        ("norms", "tiny", "norms swapped (attention.q_norm and attention.k_norm have changed places)"),
        ("mlp", "tiny", "gate and up swapped"),
        ("glm_rotation", "tiny-glmocr", "rotation style (half-split here, pairwise in the reference)"),
        ("glm_sections", "tiny-glmocr", "section layout (interleaved here, contiguous in the reference)"),
        (
            "glm_norms",
            "tiny-glmocr",
            "norms swapped (post_self_attn_layernorm and post_attention_layernorm have changed",
        ),
    ],
)
def test_a_broken_port_is_red_and_its_bug_named(check: Check, model: str, folder: str, bug: str) -> None:
    result = check(model, folder, "logits", "decoding")
    assert result.exit_code == 1, result.output
    assert f"looks like: {bug}" in result.output
    assert result.output.count("looks like:") == result.output.count("fail ")


@pytest.mark.parametrize(
    ("model", "item", "message"),
    [
        ("Unmasked", "cached prefix", "stored elsewhere than at the cursor"),
        ("Unmasked", "slots", "left padding"),
        ("SharedPositions", "slots", "left padding"),
        ("NarrowStep", "speculation", "right for one token per row only"),
        ("ShortTable", "buckets", "right below one bucket only"),
        ("ForgetsStart", "chunked prefill", "ignores `start`"),
        ("Blind", "image tokens", "pictures are dropped"),
        ("Miscounts", "image tokens", "placeholders"),
        ("Hoards", "memory", "keeps something of every request"),
        ("Endless", "end tokens", "the checkpoint ends replies with [256], the model's shape has []"),
        ("Oversized", "loading", ""),
    ],
)
def test_what_needs_no_reference_is_found_without_one(check: Check, model: str, item: str, message: str) -> None:
    result = check(model, "core", item)
    if model == "Oversized":
        # Nothing is wrong with it yet: the size shows when the cache is used.
        assert result.exit_code == 0
        result = check(model, "core", "cached prefix")
    assert result.exit_code == 1, result.output
    assert message in result.output
    whole = check("Whole", "core", item)
    assert whole.exit_code == 0, whole.output


@pytest.mark.parametrize(
    ("model", "message"), [("GraphBreak", "it fails with"), ("Bypasses", "no layer through layer_call")]
)
def test_a_step_that_cannot_be_compiled_is_found(
    registry: Registry, folders: dict[str, Path], model: str, message: str
) -> None:
    (case,) = cases(model, str(folders["core"]), registry=registry, only=["compiled"])
    with pytest.raises(ConformanceError, match=message):
        case()


def test_sizes_that_are_not_read_from_the_file_are_found(check: Check, folders: dict[str, Path]) -> None:
    assert "none of the usual names" in check("Whole", "core", "configuration").output
    described = {"model_type": "core_only", "eos_token_id": 256, "num_hidden_layers": 2, "hidden_size": 64}
    folder = folders["core"].parent / "described"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    folders["described"] = folder
    result = check("Whole", "described", "configuration")
    assert result.exit_code == 1
    assert "stands in for num_hidden_layers, hidden_size" in result.output


def test_a_plugin_that_imports_torch_at_once_is_found(broken_path: None, folders: dict[str, Path]) -> None:
    registry = registry_of(core=POINTS["core"], heavy="broken_ports.heavy")
    (case,) = cases("heavy", str(folders["core"]), registry=registry, only=["lazy import"])
    with pytest.raises(ConformanceError, match=r"broken_ports\.heavy imports numpy, torch"):
        case()


@pytest.mark.parametrize(
    ("quantizer", "message"),
    [
        ("Shuffles", "Shuffles: the codes of .*weight stand for another weight: off by 1"),
        ("Scaleless", "it fails with the quantizer returned for .* with scales not all finite and positive"),
    ],
)
def test_a_broken_quantizer_is_found(broken_path: None, folders: dict[str, Path], quantizer: str, message: str) -> None:
    (case,) = cases("qwen3vl", str(folders["tiny"]), registry=only_quantizer(quantizer), only=["quantizers"])
    with pytest.raises(ConformanceError, match=message):
        case()


def test_a_checkpoint_that_does_not_load_fails_every_item_that_needs_it(
    check: Check, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    folders["empty"] = tmp_path
    result = check("qwen3vl", "empty", "registration", "loading", "logits", "memory")
    assert result.exit_code == 1
    assert "1 passed, 3 failed, 0 not applicable" in result.output
    assert result.output.count("has no text_config") == 3


def test_an_item_that_does_not_exist_is_told(check: Check) -> None:
    result = check("qwen3vl", "tiny", "logit")
    assert result.exit_code == 2
    assert "Did you mean 'logits'?" in result.output


@pytest.mark.parametrize(
    ("footprint", "message"),
    [
        ("forgets_merger", "1 tensors are not in the footprint: model.visual.merger.linear_fc1.weight"),
        ("other_heads", ", the model has "),
        ("small_tower", "beside the weights, planned are"),
    ],
)
def test_a_wrong_footprint_is_found(registry: Registry, footprint: str, message: str) -> None:
    spec = dataclasses.replace(registry.model("qwen3vl"), footprint=f"broken_ports.footprints:{footprint}")
    # The checkpoint that comes along: in the random ones, the tower is too small to be the peak.
    changed = dataclasses.replace(registry, models={"qwen3vl": spec})
    (case,) = cases("qwen3vl", "tiny", registry=changed, only=["memory plan"])
    outcome = case.run()
    assert outcome.status == "fail"
    assert message in outcome.detail
