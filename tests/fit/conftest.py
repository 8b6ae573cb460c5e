"""Random checkpoints of every tiny kind, and the registry of the installed plugins."""

from __future__ import annotations

from pathlib import Path

import pytest

from kaminari_core.registry import Registry, load_registry
from scripts.make_random_checkpoint import make_checkpoint

KINDS = {"tiny": "qwen3vl", "tiny-untied": "qwen3vl", "tiny-moe": "qwen3vl", "tiny-glmocr": "glmocr"}


@pytest.fixture(scope="session")
def registry() -> Registry:
    """The plugins of this repository."""
    return load_registry(only=frozenset({"core", "qwen3vl", "glmocr", "http"}))


@pytest.fixture(scope="session")
def random_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each tiny kind, with the names and shapes of the class of transformers."""
    return {kind: make_checkpoint(tmp_path_factory.mktemp("fit") / kind, kind) for kind in KINDS}
