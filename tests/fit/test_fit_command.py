"""`kaminari fit`, driven as a person does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kaminari_core.cli import program
from kaminari_core.registry import Registry
from tests.fit.conftest import KINDS

GIB = 2**30

Run = Callable[..., Result]


@pytest.fixture
def fit(registry: Registry) -> Run:
    """Runs `kaminari fit`."""
    return lambda *arguments: CliRunner().invoke(program(registry), ["fit", *map(str, arguments)])


DOCUMENT = (Path(__file__).parents[2] / "docs" / "fit.md").read_text()
PRINTED = re.findall(r"^\$ kaminari fit (.*)\n((?:.*\n)*?)```$", DOCUMENT, re.MULTILINE)


def facts(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_it_loads_nothing() -> None:
    code = (
        "import sys; from kaminari_core.cli import main\n"
        "sys.argv = ['kaminari', 'fit', '--model', 'glmocr', '--checkpoint', 'glm-ocr', '--vram', '6g', '--json']\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "kaminari_glmocr.footprint" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "numpy", "PIL", "safetensors", "tokenizers"})
    assert json.loads(done.stdout)["fits"] is True


def test_the_table_of_a_published_size(fit: Run) -> None:
    result = fit("--model", "qwen3vl", "--checkpoint", "2b", "--vram", "6g")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "qwen3vl 2b on cuda in bfloat16"
    [cache] = [line for line in lines if line.startswith("cache")]
    # 4 slots x 4,097 positions x 114,688 bytes.
    assert "1.75 GiB" in cache
    assert "4 x 4096 tokens of 112 KiB" in cache
    assert any("of 6.00 GiB (--vram): does not fit" in line for line in lines)
    assert lines[-1] == "Start with: --slots 2 --max-length 4096 --visual-tokens 512"


@pytest.mark.parametrize(("arguments", "output"), PRINTED)
def test_the_document_shows_what_is_printed(fit: Run, arguments: str, output: str) -> None:
    assert fit(*arguments.split()).stdout == output


def test_the_document_has_examples() -> None:
    assert len(PRINTED) == 2


def test_the_options_it_names_fit(fit: Run) -> None:
    asked = ("--model", "qwen3vl", "--checkpoint", "2b", "--vram", "5g", "--json")
    found = facts(fit(*asked))
    assert found["fits"] is False
    again = fit(*asked, *found["flags"].split())
    assert again.exit_code == 0
    assert facts(again)["fits"] is True
    assert facts(again)["needed"] <= 5 * GIB


def test_quantized_weights_leave_room(fit: Run) -> None:
    asked = ("--model", "qwen3vl", "--checkpoint", "2b", "--vram", "6g", "--json")
    plain, packed, head = (
        facts(fit(*asked, *more)) for more in ([], ["--quantizer", "int4"], ["--quantizer", "int4", "--head", "int4"])
    )
    assert packed["fits"]
    assert packed["largest_page"]["a4_dpi"] == 200
    assert plain["largest_page"] is None
    # The table of embeddings stays, so a head of its own is more.
    assert plain["total"] > head["total"] > packed["total"]


def test_all_published_sizes_side_by_side(fit: Run) -> None:
    result = fit("--model", "qwen3vl", "--vram", "24g")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines()[1:]}
    assert list(rows) == ["2b", "4b", "8b", "32b", "30b-a3b"]
    assert "nothing fits" in rows["32b"]
    assert facts(fit("--model", "qwen3vl", "--vram", "24g", "--json")).keys() == rows.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_without_weights(fit: Run, random_checkpoints: dict[str, Path], tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_bytes((random_checkpoints[kind] / "config.json").read_bytes())
    alone = facts(fit("--model", tmp_path, "--vram", "2g", "--dtype", "float32", "--json"))
    whole = facts(fit("--model", random_checkpoints[kind], "--vram", "2g", "--dtype", "float32", "--json"))
    assert "no weight files" in alone["notes"][0]
    assert whole["notes"] == []
    assert alone["total"] == whole["total"]


def test_what_this_machine_has(fit: Run) -> None:
    found = facts(fit("--model", "qwen3vl", "--checkpoint", "tiny", "--device", "cpu", "--json"))
    assert found["dtype"] == "float32"
    assert found["budget"]["whole"] is False
    assert found["budget"]["bytes"] > 0


def test_a_card_that_is_not_there_needs_a_size(fit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    result = fit("--model", "qwen3vl", "--checkpoint", "tiny")
    assert result.exit_code == 2
    assert "--vram 6g" in result.stderr


def test_a_port_without_a_footprint_gets_a_clear_answer(registry: Registry, tmp_path: Path) -> None:
    from dataclasses import replace
    from types import MappingProxyType

    spec = replace(registry.model("qwen3vl"), footprint=None, shapes={})
    without = replace(registry, models=MappingProxyType({"qwen3vl": spec}))
    arguments = ["fit", "--model", "qwen3vl", "--checkpoint", "tiny", "--vram", "6g"]
    result = CliRunner().invoke(program(without), arguments)
    assert result.exit_code == 1
    assert "names no footprint" in result.stderr
    assert "weight files have 0.01 GiB" in result.stderr
    assert "Not known" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint", "2b", "--vram", "lots"), "give a size such as 6g"),
        (("--checkpoint", "2b", "--vram", "6g", "--slots", "0"), "slots is 0"),
        (("--checkpoint", "2b", "--vram", "6g", "--quantizer", "int3"), "int3"),
        (("--checkpoint", "2bb", "--vram", "6g"), "2bb"),
    ],
)
def test_what_cannot_be_used_is_told(fit: Run, arguments: tuple[str, ...], message: str) -> None:
    result = fit("--model", "qwen3vl", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
