"""The third-party plugin of tests/fixtures, as if it were installed, and checkpoints for its model."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kaminari_core.registry import Registry, load_registry

OUTSIDE = Path(__file__).parent.parent / "fixtures" / "outside_plugin"
PROJECT = tomllib.loads((OUTSIDE / "pyproject.toml").read_text())["project"]


@pytest.fixture
def outside_registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The core's plugin and the third party's, in this process."""
    monkeypatch.syspath_prepend(OUTSIDE)
    points = {"core": "kaminari_core.builtin", **PROJECT["entry-points"]["kaminari"]}
    return load_registry(EntryPoint(name, target, "kaminari") for name, target in points.items())


@pytest.fixture
def outside_environment(tmp_path: Path) -> dict[str, str]:
    """Variables for another process: the source on the path, beside the metadata that an installer would write."""
    metadata = tmp_path / "site" / f"outside_plugin-{PROJECT['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n"
    )
    lines = [f"{name} = {target}" for name, target in PROJECT["entry-points"]["kaminari"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[kaminari]", *lines]))
    path = os.pathsep.join([str(OUTSIDE), str(metadata.parent)])
    return {**os.environ, "PYTHONPATH": path, "KAMINARI_PLUGINS": "core,outside"}


@pytest.fixture
def alphabet(tmp_path: Path) -> Callable[..., str]:
    """Makes a checkpoint directory with the given settings (see the plugin's model.py)."""

    def make(**facts: object) -> str:
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "alphabet", "last": "z", **facts}))
        return str(folder)

    return make
