"""The bundled checkpoint reads, through our own engine, what it was trained to read: held-out lines and the sample receipt."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rapidfuzz.distance import Levenshtein

from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.flow import Event, Failed, Finished, ImagePart, Message, Request, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry

ROOT = Path(__file__).parent.parent.parent
LINES = Path(__file__).parent / "data" / "lines"
TRUTHS: dict[str, str] = json.loads((LINES / "truths.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(slots=8, max_length=1024, max_tokens=400, compile=False)
    registry = load_registry(only=frozenset({"core", "qwen3vl"}))
    engine = open_engine(registry, "qwen3vl", "tiny", config, silent)
    assert isinstance(engine, Engine)
    yield engine
    engine.close()


def _read(engine: Engine, pictures: Sequence[Path]) -> list[str]:
    """The text of each picture, all of them asked at once."""
    texts: dict[str, str] = {}
    done = threading.Event()

    def sink(event: Event) -> None:
        assert not isinstance(event, Failed), event
        if isinstance(event, Finished):
            assert event.result.finish_detail == "end_token"
            texts[event.request_id] = event.result.text
            if len(texts) == len(pictures):
                done.set()

    prompt = TextPart(engine.tasks["ocr"])
    requests = [Request((Message("user", (ImagePart(path.read_bytes()), prompt)),)) for path in pictures]
    for request in requests:
        engine.submit(request, sink)
    assert done.wait(120)
    return [texts[request.id] for request in requests]


@pytest.mark.parametrize(("kind", "count", "limit"), [("line", 60, 0.02), ("random", 30, 0.06)])
def test_held_out_lines_are_read_within_the_target(engine: Engine, kind: str, count: int, limit: float) -> None:
    """The character error rate: edits over characters of the truth, all lines together."""
    names = [name for name in TRUTHS if name.startswith(kind)]
    assert len(names) == count
    texts = _read(engine, [LINES / name for name in names])
    edits = sum(Levenshtein.distance(text, TRUTHS[name]) for text, name in zip(texts, names, strict=True))
    assert edits / sum(len(TRUTHS[name]) for name in names) <= limit


def test_the_sample_receipt_is_read_line_by_line_as_the_readme_shows(engine: Engine) -> None:
    [text] = _read(engine, [ROOT / "assets" / "receipt.png"])
    assert text.splitlines() == (ROOT / "assets" / "receipt.txt").read_text(encoding="utf-8").splitlines()
    assert f"```\n{text}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")
