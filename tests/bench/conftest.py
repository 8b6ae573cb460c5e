"""The bundled checkpoint, packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kaminari_core.checkpoint import resolve
from kaminari_core.progress import silent
from kaminari_core.quantization.packing import Order, pack
from kaminari_core.quantization.source import open_source
from kaminari_core.quantization.weight_only import int4
from kaminari_core.registry import Registry, load_registry


@pytest.fixture(scope="session")
def registry() -> Registry:
    """What this repository offers."""
    return load_registry(only=frozenset({"core", "qwen3vl", "glmocr"}))


@pytest.fixture(scope="session")
def packed(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled reader with 4-bit decoder and head."""
    spec, folder = resolve(registry, "qwen3vl", "tiny")
    out = tmp_path_factory.mktemp("packed") / "int4-head"
    pack(spec, open_source(folder), out, Order("int4", int4(), int4(), 32, "rtn"), {}, silent)
    return out
