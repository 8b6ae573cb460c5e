"""A set of a few pages, read by the bundled checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kaminari_core.cli import program
from kaminari_core.registry import load_registry
from make_pages import write_pages


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A form, a table and blank paper, and a file that is no picture."""
    folder = tmp_path_factory.mktemp("evaluation") / "pages"
    write_pages(folder, {"form": 1, "table": 1, "blank": 1}, seed=3)
    truths = json.loads((folder / "truths.json").read_text())
    truths["broken.png"] = {"text": "three\nlines & <b>more</b>", "group": "broken"}
    (folder / "truths.json").write_text(json.dumps(truths))
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


@pytest.fixture(scope="session")
def run_eval() -> Callable[..., Result]:
    """A function that runs `kaminari eval` on the bundled checkpoint of Qwen3-VL."""
    registry = load_registry()

    def run(*options: str | Path) -> Result:
        words = ["eval", "--model", "qwen3vl", "--checkpoint", "tiny", "--max-length", "1024", *map(str, options)]
        return CliRunner().invoke(program(registry), words)

    return run
