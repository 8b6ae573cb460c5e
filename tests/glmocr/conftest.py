"""Random checkpoints made when the tests start: with the multi-token prediction layer, as published ones have it, and without."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kaminari_core.config import EngineConfig
from kaminari_glmocr.model import GlmOcr, load
from kaminari_glmocr.reference import StockGlmOcr
from kaminari_glmocr.reference import load as load_reference
from scripts.make_random_checkpoint import make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def tiny_random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the multi-token prediction layer."""
    return make_checkpoint(tmp_path_factory.mktemp("random") / "glmocr", "tiny-glmocr")


@pytest.fixture(scope="session")
def without_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without it."""
    return make_checkpoint(tmp_path_factory.mktemp("random") / "plain", "tiny-glmocr", draft_head=False)


@pytest.fixture(scope="session")
def config() -> EngineConfig:
    """Exact sizing, so that pictures are those of the reference processor."""
    return EngineConfig(device="cpu", dtype="float32", sizing="exact", visual_tokens=64, max_length=512, compile=False)


@pytest.fixture(scope="session")
def model(tiny_random: Path, config: EngineConfig) -> GlmOcr:
    """The checkpoint, loaded by us without its draft head."""
    return load(tiny_random, config, CPU, lambda *_: None)


@pytest.fixture(scope="session")
def drafting(tiny_random: Path, config: EngineConfig) -> GlmOcr:
    """The checkpoint, loaded by us with its draft head."""
    return load(tiny_random, dataclasses.replace(config, draft="mtp"), CPU, lambda *_: None)


@pytest.fixture(scope="session")
def reference(tiny_random: Path) -> StockGlmOcr:
    """The checkpoint, loaded by transformers."""
    return load_reference(tiny_random, CPU, torch.float32)
