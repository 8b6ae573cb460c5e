"""Random checkpoints made when the tests start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kaminari_core.config import EngineConfig
from kaminari_qwen3vl.model import Qwen3VL, load
from kaminari_qwen3vl.reference import StockQwen3VL
from kaminari_qwen3vl.reference import load as load_reference
from scripts.make_random_checkpoint import make_checkpoint

KINDS = ("tiny", "tiny-untied", "tiny-moe")
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each tiny kind."""
    return {kind: make_checkpoint(tmp_path_factory.mktemp("random") / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def tiny_random(checkpoints: dict[str, Path]) -> Path:
    """The dense checkpoint with tied embeddings."""
    return checkpoints["tiny"]


@pytest.fixture(scope="session")
def config() -> EngineConfig:
    """Exact sizing, so that pictures are those of the reference processor."""
    return EngineConfig(device="cpu", dtype="float32", sizing="exact", visual_tokens=64, max_length=512, compile=False)


@pytest.fixture(scope="session")
def models(checkpoints: dict[str, Path], config: EngineConfig) -> dict[str, Qwen3VL]:
    """Each checkpoint, loaded by us."""
    return {kind: load(path, config, CPU, lambda *_: None) for kind, path in checkpoints.items()}


@pytest.fixture(scope="session")
def model(models: dict[str, Qwen3VL]) -> Qwen3VL:
    """The dense, tied checkpoint, loaded by us."""
    return models["tiny"]


@pytest.fixture(scope="session")
def references(checkpoints: dict[str, Path]) -> dict[str, StockQwen3VL]:
    """Each checkpoint, loaded by transformers."""
    return {kind: load_reference(path, CPU, torch.float32) for kind, path in checkpoints.items()}
