"""Settings of the whole suite, and conversations that every model is compared on."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Before anything imports huggingface_hub: a test that would reach for the hub fails instead.
os.environ["HF_HUB_OFFLINE"] = "1"
# Compiled graphs of tests are kept between runs, but not among the user's.
os.environ.setdefault("KAMINARI_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"kaminari-tests-{os.getuid()}"))

import numpy as np
import pytest
import torch
from PIL import Image

from kaminari_core.flow import ImagePart, Message, Part, Request, Role, TextPart
from kaminari_core.kernels.library import BuildError, find_compiler, library_path

# With more threads than free cores, small matrices are slower by a multiple: the threads wait for each other.
torch.set_num_threads(1)

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Compile the CPU kernels where that was never done, so that no test that waits for a server waits for this as well."""
    try:
        done = library_path(find_compiler()).exists()
    except BuildError:
        return
    if not done:
        program = str(Path(sys.executable).with_name("kaminari"))
        subprocess.run([program, "doctor", "--compile"], check=True)


@pytest.fixture(scope="session")
def ask() -> Callable[..., Request]:
    """A function that makes a request of one user message."""
    return lambda *parts: Request((turn("user", *parts),))


@pytest.fixture(scope="session")
def say() -> Callable[..., Message]:
    """`turn`, for tests to make their own conversations."""
    return turn
