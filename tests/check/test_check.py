"""The conformance kit on models that keep everything: green, with numbers, in text, in JSON and as an author's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from kaminari_core.check import Case, cases
from kaminari_core.check.cases import items
from kaminari_core.check.subject import Settings
from kaminari_core.cli import program
from kaminari_core.errors import UsageError
from kaminari_core.registry import Registry
from tests.check.conftest import FIXTURE, POINTS, only_quantizer, registry_of

MODELS = {
    # Every model of this repository on every kind of random checkpoint that can be made for it, and on what comes with it.
    ("qwen3vl", "tiny"): False,
    ("qwen3vl", "tiny-moe"): True,
    ("qwen3vl", "tiny-untied"): True,
    ("glmocr", "tiny-glmocr"): False,
}
OWN = registry_of(**{name: target for name, target in POINTS.items() if name != "broken"}).models
BUNDLED = [(spec.name, name) for spec in OWN.values() for name in spec.bundled]


def run_all(found: list[Case]) -> dict[str, str]:
    outcomes = {case.name: case.run() for case in found}
    assert [f"{name}: {outcome.text}" for name, outcome in outcomes.items() if outcome.status == "fail"] == []
    return {name: outcome.status for name, outcome in outcomes.items()}


def test_every_model_is_checked() -> None:
    assert {model for model, _ in MODELS} == set(OWN)


@pytest.mark.parametrize(
    ("model", "folder"), [pytest.param(*key, marks=[pytest.mark.slow] if slow else []) for key, slow in MODELS.items()]
)
def test_random_checkpoints_are_green(registry: Registry, folders: dict[str, Path], model: str, folder: str) -> None:
    settings = Settings(steps=12, compile=False)
    status = run_all(cases(model, str(folders[folder]), registry=registry, settings=settings))
    assert [name for name, found in status.items() if found != "pass"] == ["compiled"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "folder"), [*MODELS, ("Whole", "core")])
def test_compiling_is_green(registry: Registry, folders: dict[str, Path], model: str, folder: str) -> None:
    (case,) = cases(model, str(folders[folder]), registry=registry, only=["compiled"], settings=Settings(steps=12))
    # One row in both length buckets, and two rows in the first.
    assert case().numbers == {"graphs": 3, "buckets": 3}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), BUNDLED)
def test_bundled_checkpoints_are_green(registry: Registry, model: str, name: str) -> None:
    status = run_all(cases(model, name, registry=registry))
    assert [name for name, found in status.items() if found != "pass"] == []


def test_a_model_without_reference_is_green(registry: Registry, folders: dict[str, Path]) -> None:
    found = cases("Whole", str(folders["core"]), registry=registry, settings=Settings(steps=12, compile=False))
    outcomes = {case.name: case() for case in found}
    absent = {name: outcome.detail for name, outcome in outcomes.items() if outcome.status == "n/a"}
    assert absent == {
        "configuration": "config.json has none of the usual names for sizes",
        "logits": "the plugin names no reference",
        "decoding": "the plugin names no reference",
        "compiled": "left out on request (--no-compile)",
        "quantizers": "no module names linear layers to convert (`quantizable`), or the weights are not loaded by "
        "kaminari_core.weights",
        "memory plan": "the plugin names no footprint, so only the size of the weight files is known beforehand",
    }
    # 2 buffers, 2 layers, 3 slots of 1024 positions and a spare one, 2 heads of 32, 4 bytes a number.
    assert outcomes["memory"].numbers["cache_bytes"] == 2 * 2 * 3 * 1025 * 2 * 32 * 4


def test_a_quantizer_of_somebody_else_is_green(broken_path: None, folders: dict[str, Path]) -> None:
    (case,) = cases("qwen3vl", str(folders["tiny"]), registry=only_quantizer("Symmetric"), only=["quantizers"])
    # Two layers with a fused q, k, v, an output projection, a fused gate and up, and a down projection each.
    outcome = case()
    assert outcome.numbers == {"quantizers": 1, "layers": 8}
    assert outcome.detail.startswith("Symmetric converts 8 layers (weights off by at most 0.0")


def test_a_packed_checkpoint_is_no_subject(registry: Registry, folders: dict[str, Path], tmp_path: Path) -> None:
    command = ["quantize", "--model", "qwen3vl", "--checkpoint", str(folders["tiny"]), "--quantizer", "int8"]
    assert CliRunner().invoke(program(registry), [*command, "--out", str(tmp_path / "packed")]).exit_code == 0
    with pytest.raises(UsageError, match="is packed with int8, and a check compares in full precision"):
        cases("qwen3vl", str(tmp_path / "packed"), registry=registry)


def test_json_holds_every_number(registry: Registry, folders: dict[str, Path]) -> None:
    command = ["check", "--model", "Whole", "--checkpoint", str(folders["core"]), "--json", "--only", "slots"]
    result = CliRunner().invoke(program(registry), [*command, "--only", "logits"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["model"], report["pass"], report["n/a"]) == ("Whole", 1, 1)
    row = next(row for row in report["items"] if row["item"] == "slots")
    assert row["status"] == "pass"
    assert row["numbers"] == {"tokens": 12 + 24 + 9 + 24 + 13, "rows": 3}


def test_items_are_an_authors_tests(folders: dict[str, Path], pytester_run: Callable[..., str]) -> None:
    # Three items through a test of their own, and three of those that the options collect.
    folder = str(folders["core"])
    wanted = "['slots', 'logits', 'loading']"
    source = (
        "import pytest\n"
        "from kaminari_core.check import cases\n\n\n"
        f"@pytest.mark.parametrize('case', cases('SharedPositions', {folder!r}, only={wanted}), ids=str)\n"
        "def test_conforms(case):\n"
        "    case()\n"
    )
    options = ["--kaminari-model", "Endless", "--kaminari-checkpoint", folder, "-k", "conforms or tokens or logits"]
    output = pytester_run(source, *options)
    assert f"2 failed, 3 passed, 1 skipped, {len(items()) - 3} deselected" in output
    assert "SharedPositions slots: " in output
    assert "looks like: rows influence each other" in output
    assert "kaminari check: Endless end tokens" in output
    assert "the checkpoint ends replies with [256]" in output
    assert "the plugin names no reference" in output


@pytest.fixture
def pytester_run(tmp_path: Path) -> Callable[..., str]:
    """Runs pytest as the author of the broken ports would, with their plugin installed."""
    metadata = tmp_path / "site" / "broken_ports-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-ports\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kaminari]\nbroken = broken_ports.plugin\n")
    path = os.pathsep.join([str(FIXTURE), str(metadata.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "KAMINARI_PLUGINS": "core,broken", "KAMINARI_COMPILE": "0"}

    def run(source: str, *options: str) -> str:
        folder = tmp_path / "suite"
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "test_conformance.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-v", "-rs", *options]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout

    return run
