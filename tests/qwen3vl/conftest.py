"""Random checkpoints made when the tests start, and conversations to compare on."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kaminari_core.config import EngineConfig
from kaminari_core.flow import ImagePart, Message, Part, Request, Role, TextPart
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


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def turn(role: Role, *parts: str | tuple[int, int]) -> Message:
    """A message of texts and pictures, the latter given as sizes (width, height)."""
    made: list[Part] = []
    for number, part in enumerate(parts):
        made.append(
            TextPart(part) if isinstance(part, str) else ImagePart(png(*part, seed=number), f"picture {number}")
        )
    return Message(role, tuple(made))


CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "text": (turn("user", "Hello, what can you read?"),),
    "one image": (turn("user", (200, 150), "Read all the text in the image."),),
    "three images": (turn("user", (64, 64), "and", (200, 90), (90, 200), "Which of these is wide?"),),
    "two turns": (
        turn("system", "You are brief."),
        turn("user", (100, 120), "What is this?"),
        turn("assistant", "An invoice."),
        turn("user", "And this?", (130, 70)),
    ),
}


@pytest.fixture(params=list(CONVERSATIONS))
def conversation(request: pytest.FixtureRequest) -> Request:
    """Each conversation in turn."""
    return Request(CONVERSATIONS[request.param])


@pytest.fixture(scope="session")
def ask() -> Callable[..., Request]:
    """A function that makes a request of one user message."""
    return lambda *parts: Request((turn("user", *parts),))


@pytest.fixture(scope="session")
def say() -> Callable[..., Message]:
    """`turn`, for tests to make their own conversations."""
    return turn
