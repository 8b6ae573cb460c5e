"""From `--model` and `--checkpoint` to a spec and a directory, and from a configuration to a device, a dtype and an engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError, UnknownNameError, UsageError
from kaminari_core.flow import Message, Request, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.placement import FLOAT32_BELOW, resolve_device, resolve_dtype
from kaminari_core.progress import silent
from kaminari_core.registry import Registry

BUNDLED = Path(__file__).parent.parent / "fixtures" / "outside_plugin" / "outside_plugin" / "latin"


def test_a_bundled_name_is_a_folder_of_the_plugin(outside_registry: Registry) -> None:
    spec, folder = resolve(outside_registry, "alphabet", "latin")
    assert (spec.name, folder) == ("alphabet", BUNDLED)


def test_without_a_checkpoint_the_bundled_one_is_taken_and_said(
    outside_registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve(outside_registry, "alphabet", None)[1] == BUNDLED
    assert caplog.messages == ["no --checkpoint was given: using 'latin', which comes with the plugin"]


def test_a_directory_given_as_model_is_resolved_by_its_model_type(
    outside_registry: Registry, alphabet: Callable[..., str]
) -> None:
    folder = alphabet()
    assert resolve(outside_registry, folder, None) == (outside_registry.model("alphabet"), Path(folder))
    assert resolve(outside_registry, folder, "latin")[1] == BUNDLED


def test_a_bundled_name_wins_over_a_directory_which_can_be_written_as_a_path(
    outside_registry: Registry, alphabet: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(alphabet()).rename(tmp_path / "latin")
    monkeypatch.chdir(tmp_path)
    assert resolve(outside_registry, "alphabet", "latin")[1] == BUNDLED
    assert resolve(outside_registry, "alphabet", "./latin")[1] == Path("latin")


def test_a_directory_of_an_unknown_type_says_which_types_there_are(
    outside_registry: Registry, alphabet: Callable[..., str]
) -> None:
    with pytest.raises(UnknownNameError, match=r"serves the model_type 'runes'\. There are: alphabet\."):
        resolve(outside_registry, alphabet(model_type="runes"), None)


def test_a_checkpoint_of_another_model_is_refused(outside_registry: Registry, alphabet: Callable[..., str]) -> None:
    with pytest.raises(CheckpointError, match="of model_type 'runes', but alphabet serves alphabet"):
        resolve(outside_registry, "alphabet", alphabet(model_type="runes"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read"),
        ("[]", "names no model_type"),
        ("{}", "names no model_type"),
    ],
    ids=["missing", "damaged", "list", "empty"],
)
def test_a_directory_that_is_no_checkpoint_says_why(
    outside_registry: Registry, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        resolve(outside_registry, str(tmp_path), None)
    with pytest.raises(CheckpointError, match=message):
        resolve(outside_registry, "alphabet", str(tmp_path))


def test_a_file_is_no_checkpoint(outside_registry: Registry, alphabet: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=r"config\.json is a file; give the directory"):
        resolve(outside_registry, "alphabet", alphabet() + "/config.json")


def test_a_name_that_is_nothing_says_what_there_is(outside_registry: Registry) -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'latin'\? There are: latin\. .* written owner/name"):
        resolve(outside_registry, "alphabet", "lattin")


def test_a_hub_id_without_the_optional_package_says_how_to_get_it(
    outside_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None in sys.modules is how Python itself marks a module as not importable.
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"no directory 'owner/name', .* pip install 'kaminari-core\[hub\]'"):
        resolve(outside_registry, "alphabet", "owner/name")


def test_a_hub_id_that_cannot_be_had_is_an_error_that_names_it(outside_registry: Registry) -> None:
    # The suite sets HF_HUB_OFFLINE, so the library answers without a network.
    with pytest.raises(CheckpointError, match="no directory 'owner/name', and the Hugging Face hub did not give it"):
        resolve(outside_registry, "alphabet", "owner/name")


def test_auto_is_float32_on_a_cpu_for_small_checkpoints_only(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    for size, expected in ((FLOAT32_BELOW - 1, torch.float32), (FLOAT32_BELOW, torch.bfloat16)):
        with weights.open("wb") as file:
            file.truncate(size)
        assert resolve_dtype("auto", torch.device("cpu"), tmp_path) is expected
        assert resolve_dtype("auto", torch.device("cuda"), tmp_path) is torch.bfloat16
        assert resolve_dtype("float16", torch.device("cpu"), tmp_path) is torch.float16
    with pytest.raises(UsageError, match="dtype is 'int8'; choose auto, float32"):
        resolve_dtype("int8", torch.device("cpu"), tmp_path)


@pytest.mark.parametrize("name", ["mps", "gpu", "meta", "cuda:x", ""])
def test_a_device_that_is_none_of_ours_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="choose auto, cpu, cuda or cuda:N"):
        resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_a_clear_error() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UsageError, match="device is 'cuda:1', but"):
        resolve_device("cuda:1")


def test_opening_an_engine_resolves_its_configuration(outside_registry: Registry) -> None:
    stages: list[tuple[str, int, int]] = []
    config = EngineConfig(device="cpu", compile=False)
    engine = open_engine(
        outside_registry, "alphabet", "latin", config, lambda *stage: stages.append(stage), "served-name"
    )
    try:
        assert engine.name == "served-name"
        assert (engine.config.device, engine.config.dtype) == ("cpu", "float32")
        # The model's longest sequence is 512; the default of 4096 cannot be kept.
        assert engine.config.max_length == 512
        assert engine.tasks == {"whole": "a"}
        assert stages == [("load", 1, 1)]
        assert engine.generate(Request((Message("user", (TextPart("x"),)),))).text == "yz"
    finally:
        engine.close()


@pytest.mark.parametrize("wrong", [{"scheduler": "none"}, {"cache": "none"}, {"quantizer": "int3"}], ids=str)
def test_names_are_checked_before_anything_is_loaded(outside_registry: Registry, wrong: dict[str, str]) -> None:
    stages: list[str] = []
    with pytest.raises(UnknownNameError):
        open_engine(
            outside_registry, "alphabet", "latin", EngineConfig(**wrong), lambda stage, *_: stages.append(stage)
        )
    assert stages == []


def test_silent_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent("load", 1, 2)
    assert capsys.readouterr() == ("", "")
