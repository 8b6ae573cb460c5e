"""Random checkpoints of every kind, packed, and the function that packs one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kaminari_core.config import EngineConfig
from kaminari_core.flow import Message, Request, TextPart
from kaminari_core.parity import greedy
from kaminari_core.progress import silent
from kaminari_core.protocols import Model, ReferenceRun
from kaminari_core.quantization.packing import Order, Report, pack
from kaminari_core.quantization.source import open_source
from kaminari_core.quantization.weight_only import int4, int8
from kaminari_core.registry import Registry, load_registry
from scripts.make_random_checkpoint import make_checkpoint

CPU = torch.device("cpu")
KINDS = {
    "tiny": "qwen3vl", "tiny-untied": "qwen3vl", "tiny-moe": "qwen3vl", "tiny-glmocr": "glmocr",
}  # fmt: skip
Pack = Callable[..., Report]


@pytest.fixture(scope="session")
def registry() -> Registry:
    """What this repository offers."""
    return load_registry(only=frozenset({"core", "qwen3vl", "glmocr"}))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random checkpoint of each kind."""
    return {kind: make_checkpoint(tmp_path_factory.mktemp("quantization") / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def packer(registry: Registry, folders: dict[str, Path]) -> Pack:
    """Packs one of the checkpoints, or any directory of qwen3vl, into `out`."""

    def run(
        kind: str | Path, out: Path, *, bits: int = 4, head: int = 0, search: Any = "rtn", group: int = 32
    ) -> Report:
        made = {0: None, 4: int4(), 8: int8()}
        quantizer = made[bits]
        assert quantizer is not None
        order = Order(f"int{bits}", quantizer, made[head], group, search)
        folder, model = (kind, "qwen3vl") if isinstance(kind, Path) else (folders[kind], KINDS[kind])
        return pack(registry.model(model), open_source(folder), out, order, {}, silent)

    return run


@pytest.fixture(scope="session")
def packed(packer: Pack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed checkpoints: of each kind with 4 bits, and with heads of 8 bits as `KIND+head`. Not to be changed."""
    found = {}
    for kind in KINDS:
        for name, head in ((kind, 0), (f"{kind}+head", 8)):
            if kind == "tiny-moe" and head:
                continue
            found[name] = tmp_path_factory.mktemp("packed") / name
            packer(kind, found[name], head=head)
    return found


def load(registry: Registry, model: str, folder: Path, **changes: Any) -> Model:
    """Load a checkpoint in float32, computing with the stored form itself."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_length": 256, "kernels": "plain"}
    loaded: Model = registry.model(model).load()(folder, EngineConfig(**{**settings, **changes}), CPU, silent)
    return loaded


def reply(model: Model, steps: int = 8) -> ReferenceRun:
    """A greedy reply to a text, with logits."""
    return greedy(model, model.prepare(Request((Message("user", (TextPart("The total of 3 items is"),)),))), steps)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that is one file."""
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest as JSON."""
    values: dict[str, Any] = json.loads((folder / "quantized.json").read_text(encoding="utf-8"))
    return values
