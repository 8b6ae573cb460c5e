"""The bundled checkpoint reads lines of words that it was never trained on, and most guesses of its draft head are right."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from pathlib import Path

import pytest
from rapidfuzz.distance import Levenshtein

from kaminari_core.config import EngineConfig
from kaminari_core.flow import ImagePart, Message, Request, Result, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.registry import load_registry

LINES = Path(__file__).parents[1] / "qwen3vl" / "data" / "lines"
CONFIG = EngineConfig(device="cpu", dtype="float32", compile=False, slots=1, draft_auto=False, draft_tokens=2)


def read(config: EngineConfig, count: int) -> tuple[list[str], list[Result]]:
    """The truths of some lines and the replies to them."""
    truths = dict(list(json.loads((LINES / "truths.json").read_text()).items())[:count])
    engine = open_engine(load_registry(), "glmocr", "tiny", config, lambda *_: None)
    try:
        parts = [(ImagePart((LINES / name).read_bytes()), TextPart(engine.tasks["ocr"])) for name in truths]
        replies = [engine.generate(Request((Message("user", part),), max_tokens=80)) for part in parts]
    finally:
        engine.close()
    return list(truths.values()), replies


@pytest.fixture(scope="module")
def plain() -> tuple[list[str], list[Result]]:
    return read(CONFIG, 24)


def test_lines_are_read(plain: tuple[list[str], list[Result]]) -> None:
    truths, replies = plain
    edits = sum(Levenshtein.distance(truth, reply.text) for truth, reply in zip(truths, replies, strict=True))
    assert edits / sum(map(len, truths)) < 0.06
    assert all(reply.finish_reason == "stop" for reply in replies)


def test_guesses_of_the_draft_head_are_often_right_and_change_nothing(plain: tuple[list[str], list[Result]]) -> None:
    _, drafted = read(dataclasses.replace(CONFIG, draft="mtp"), 24)
    assert [reply.text for reply in drafted] == [reply.text for reply in plain[1]]
    proposed = sum(reply.drafts.proposed for reply in drafted)
    assert sum(reply.drafts.accepted for reply in drafted) / proposed > 0.55


def test_the_folder_has_the_published_layout() -> None:
    folder = Path(str(files("kaminari_glmocr"))) / "tiny"
    config = json.loads((folder / "config.json").read_text())
    assert config["text_config"]["num_nextn_predict_layers"] == 1
    assert len(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == 2
    assert (folder / "model.safetensors").stat().st_size < 8_000_000
