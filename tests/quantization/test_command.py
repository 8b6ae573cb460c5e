"""`kaminari quantize` as people run it, and what `--quantizer` makes of a checkpoint directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import kaminari_qwen3vl
from kaminari_core.cli import program
from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.flow import ImagePart, Message, Request, TextPart
from kaminari_core.launch import open_engine, open_supervised
from kaminari_core.progress import silent
from kaminari_core.quantization.choice import quantizer_of
from kaminari_core.registry import Registry
from kaminari_core.specs import ModelSpec
from tests.quantization.conftest import load, manifest, reply

PAGES = Path(__file__).parent.parent / "qwen3vl" / "data" / "lines"
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def run(registry: Registry) -> Run:
    return lambda *words: CliRunner().invoke(program(registry), ["quantize", *(str(word) for word in words)])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name in ("line-00.png", "random-00.png"):
        (folder / name).write_bytes((PAGES / name).read_bytes())
    return folder


def test_a_checkpoint_is_packed_and_then_served(run: Run, registry: Registry, tmp_path: Path) -> None:
    out = tmp_path / "tiny-int4"
    done = run("--model", "qwen3vl", "--checkpoint", "tiny", "--quantizer", "int4", "--group", "32", "--out", out)
    assert done.exit_code == 0, done.output
    # Five layers of seven tensors each.
    assert "35 weights converted, 91 tensors kept as they are" in done.stdout
    assert f"{out} is ready: kaminari run --model qwen3vl --checkpoint {out}" in done.stdout
    config = EngineConfig(compile=False, slots=1, max_length=512, max_tokens=64, kernels="plain")
    with contextlib.closing(open_engine(registry, "qwen3vl", str(out), config, silent)) as engine:
        assert engine.config.quantizer == "int4"
        parts = (ImagePart((PAGES / "line-00.png").read_bytes()), TextPart(engine.tasks["ocr"]))
        truth = json.loads((PAGES / "truths.json").read_text(encoding="utf-8"))["line-00.png"]
        assert engine.generate(Request((Message("user", parts),))).text == truth


def test_pages_make_the_error_of_outputs_known_and_smaller(run: Run, pages: Path, tmp_path: Path) -> None:
    errors = {}
    for scale in ("mse", "activation"):
        out = tmp_path / scale
        done = run(
            "--model", "qwen3vl", "--checkpoint", "tiny", "--quantizer", "int4", "--scale", scale, "--calibrate", pages,
            "--head", "int8", "--out", out, "--json",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        facts = json.loads(done.stdout)
        assert facts["scale"] == manifest(out)["scale"] == scale
        assert len(facts["layers"]) == 36
        found = [layer["output_error"] for layer in facts["layers"].values()]
        assert all(0 < error < 0.5 for error in found)
        errors[scale] = sum(found) / len(found)
    assert errors["activation"] < 0.7 * errors["mse"]


def test_a_draft_head_is_searched_without_pages(run: Run, pages: Path, tmp_path: Path) -> None:
    out = tmp_path / "glm"
    done = run(
        "--model",
        "glmocr",
        "--checkpoint",
        "tiny",
        "--quantizer",
        "int4",
        "--calibrate",
        pages,
        "--group",
        "32",
        "--out",
        out,
    )
    assert done.exit_code == 0, done.output
    entries = manifest(out)["tensors"]
    drafts = {name for name in entries if ".layers.4." in name}
    # Seen on pages are the four decoder layers; the draft head guesses while replies are decoded with it.
    assert {name for name, entry in entries.items() if entry["output_error"] is None} == drafts
    assert len(drafts) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantizer", "int3"], "There is no quantizer 'int3'."),
        (["--quantizer", "int4", "--scale", "activation"], "--scale activation needs pages to look at"),
        (["--quantizer", "int4", "--calibrate", "no/such"], "--calibrate no/such is no directory"),
        (["--quantizer", "int4", "--calibrate", "."], "holds no pictures (.png, .jpg"),
        (["--quantizer", "int4", "--group", "48"], "'48' is not one of '32', '64', '128'"),
        (["--quantizer", "int4", "--head", "int2"], "'int2' is not one of 'none', 'int8', 'int4'"),
        ([], "Missing option '--quantizer'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_used_is_one_clear_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("--model", "qwen3vl", "--checkpoint", "tiny", "--out", tmp_path / "out", *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_loads_its_weights_itself_cannot_be_packed(registry: Registry, tmp_path: Path) -> None:
    spec = ModelSpec(name="own", target="tests.quantization.test_command:load_itself", model_types=("qwen3_vl",))
    cli = program(dataclasses.replace(registry, models={**registry.models, "own": spec}))
    words = [
        "quantize",
        "--model",
        "own",
        "--checkpoint",
        str(_bundled()),
        "--quantizer",
        "int4",
        "--out",
        str(tmp_path / "x"),
    ]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "own names no linear layers that may be, or loads its weights by other means" in done.stderr


class Itself:
    """A model whose weights no rule describes."""

    def __init__(self) -> None:
        self.network = torch.nn.Linear(64, 64)


def load_itself(checkpoint: Path, config: EngineConfig, device: torch.device, progress: object) -> Itself:
    return Itself()


def _bundled() -> Path:
    return Path(str(kaminari_qwen3vl.__file__)).parent / "tiny"


def test_auto_and_the_right_name_take_a_packed_directory(packed: dict[str, Path], folders: dict[str, Path]) -> None:
    assert quantizer_of(packed["tiny"], "auto", "qwen3vl") == "int4"
    assert quantizer_of(packed["tiny"], "int4", "qwen3vl") == "int4"
    assert quantizer_of(folders["tiny"], "auto", "qwen3vl") == "none"
    assert quantizer_of(folders["tiny"], "none", "qwen3vl") == "none"


def test_full_weights_of_a_packed_directory_are_not_to_be_had(packed: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="is packed with int4: its weights in full precision are not in it"):
        quantizer_of(packed["tiny"], "none", "qwen3vl")
    with pytest.raises(UsageError, match="is packed with int4, not with int8"):
        quantizer_of(packed["tiny"], "int8", "qwen3vl")


def test_the_command_in_the_message_makes_what_was_asked_for(
    registry: Registry, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(quantizer="int8", compile=False)
    with pytest.raises(UsageError, match="is not quantized, which is a step of its own") as caught:
        open_engine(registry, "qwen3vl", "tiny", config, silent)
    command = str(caught.value).split("`")[1]
    assert command == "kaminari quantize --model qwen3vl --checkpoint tiny --quantizer int8 --out tiny-int8"
    assert str(caught.value).endswith("use --checkpoint tiny-int8")
    assert CliRunner().invoke(program(registry), shlex.split(command)[1:]).exit_code == 0
    reply(load(registry, "qwen3vl", tmp_path / "tiny-int8"), steps=2)
    # Elsewhere it is made beside the checkpoint.
    with pytest.raises(UsageError) as caught:
        open_engine(registry, "qwen3vl", str(folders["tiny"]), config, silent)
    assert str(caught.value).split("`")[1].endswith(f"--out {folders['tiny']}-int8")


def test_a_supervised_engine_is_refused_before_its_process_starts(registry: Registry, folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="kaminari quantize"):
        open_supervised(registry, "qwen3vl", str(folders["tiny"]), EngineConfig(quantizer="int4"), silent)


def test_the_quantizers_are_listed(registry: Registry) -> None:
    listed = CliRunner().invoke(program(registry), ["plugins"]).stdout
    assert "Quantizers:\n  int4  4-bit weights in groups" in listed
    assert "\n  int8  8-bit weights in groups" in listed
