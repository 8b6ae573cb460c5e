"""Evidence of the bundled readers: pictures that they really read, with guesses and without, whatever they are sent."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import kaminari_glmocr.plugin as glmocr
import kaminari_qwen3vl.plugin as qwen3vl
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.evidence.confidence import lines_with_confidence
from kaminari_core.evidence.loops import guard_for
from kaminari_core.flow import ImagePart, Message, Part, Request, Sampling, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_core.tasks import READING, fill, task_of

LINES = Path(__file__).parents[1] / "qwen3vl" / "data" / "lines"


def ask(*parts: Part, **fields: object) -> Request:
    return Request((Message("user", parts),), **fields)  # type: ignore[arg-type]


def line(name: str = "line-00.png") -> ImagePart:
    return ImagePart((LINES / name).read_bytes(), name)


@pytest.mark.parametrize("tasks", [glmocr.TASKS, qwen3vl.TASKS], ids=["glmocr", "qwen3vl"])
def test_the_tasks_of_both_models_are_known_by_their_words(tasks: dict[str, str]) -> None:
    assert tasks.keys() & READING
    for name, phrase in tasks.items():
        template = {"total": ""} if "{template}" in phrase else None
        request = ask(line(), TextPart(fill(name, phrase, template)))
        assert task_of(request, tasks) == name
        assert (guard_for(request, EngineConfig(), tasks) is not None) == (name in READING) == (name != "caption")


@pytest.fixture(scope="module")
def reader() -> Iterator[Engine]:
    """GLM-OCR's small reader, which guesses ahead with its own head."""
    config = EngineConfig(
        device="cpu", dtype="float32", compile=False, slots=2, max_length=512, max_tokens=300, draft="mtp", draft_auto=False
    )  # fmt: skip
    with closing(open_engine(load_registry(), "glmocr", "tiny", config, silent)) as engine:
        yield engine


@pytest.mark.parametrize(
    "parts",
    [(TextPart("hi"),), (TextPart(glmocr.TASKS["ocr"]),), (line(),)],
    ids=["words that are no task", "a task without a picture", "a picture without words"],
)
def test_an_odd_request_to_a_reader_ends(reader: Engine, parts: tuple[Part, ...]) -> None:
    result = reader.generate(ask(*parts, loop_guard=True))
    assert result.finish_detail in ("end_token", "loop")
    assert result.usage.completion_tokens < 300


def test_confidence_does_not_depend_on_guesses_and_tells_a_clear_line_from_noise(reader: Engine) -> None:
    clear = reader.generate(ask(line(), confidence=True))
    assert clear.drafts.accepted > 0, "tokens came several in a step"
    listed = reader.generate(ask(line(), sampling=Sampling(logprobs=1)))
    assert [token.logprob for token in clear.tokens] == pytest.approx(
        [token.logprob for token in listed.tokens], abs=1e-4
    )
    (read,) = lines_with_confidence(clear)
    assert read.text == clear.text
    grey = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 120), dtype=np.uint8)
    Image.fromarray(pixels).save(grey, "PNG")
    noise = reader.generate(ask(ImagePart(grey.getvalue()), confidence=True))
    assert min((each.minimum for each in lines_with_confidence(noise)), default=0.0) < read.minimum
