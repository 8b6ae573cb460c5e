"""The bundled readers read almost as well with quantized weights: within half a point of character error rate."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest
from rapidfuzz.distance import Levenshtein

from kaminari_core.config import EngineConfig
from kaminari_core.flow import Event, Failed, Finished, ImagePart, Message, Request, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.quantization.calibration import calibrate
from kaminari_core.quantization.packing import Order, pack
from kaminari_core.quantization.source import open_source
from kaminari_core.registry import Registry

LINES = Path(__file__).parent.parent / "qwen3vl" / "data" / "lines"
TRUTHS: dict[str, str] = json.loads((LINES / "truths.json").read_text(encoding="utf-8"))
SEEN = list(TRUTHS)[::6]
"""Lines that the search for scales looks at; the others are read."""
LOSS = 0.005


def error_rate(registry: Registry, model: str, checkpoint: str) -> float:
    """Edits over characters of the truth, all lines together."""
    config = EngineConfig(compile=False, slots=8, max_length=1024, max_tokens=200, queue=len(TRUTHS))
    engine = open_engine(registry, model, checkpoint, config, silent)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    waiting = {}
    truths = {name: truth for name, truth in TRUTHS.items() if name not in SEEN}
    for name, truth in truths.items():
        parts = (ImagePart((LINES / name).read_bytes()), TextPart(engine.tasks["ocr"]))
        request = Request((Message("user", parts),))
        waiting[request.id] = truth
        engine.submit(request, events.put)
    edits = 0
    while waiting:
        event = events.get()
        assert not isinstance(event, Failed), event
        if isinstance(event, Finished):
            edits += Levenshtein.distance(event.result.text, waiting.pop(event.request_id))
    engine.close()
    return edits / sum(len(truth) for truth in truths.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3vl", "glmocr"])
@pytest.mark.parametrize(
    ("quantizer", "group", "search"), [("int4", 32, "mse"), ("int4", 32, "activation"), ("int8", 64, "mse")]
)
def test_the_readers_still_read(
    registry: Registry, tmp_path: Path, model: str, quantizer: str, group: int, search: str
) -> None:
    spec = registry.model(model)
    folder = Path(__file__).parent.parent.parent / f"kaminari_{model}" / f"kaminari_{model}" / "tiny"
    seen = {}
    if search == "activation":
        seen = calibrate(spec, folder, [LINES / name for name in SEEN], EngineConfig(compile=False), silent)
    head = registry.quantizer("int8").load()()
    order = Order(quantizer, registry.quantizer(quantizer).load()(), head, group, search)  # type: ignore[arg-type]
    pack(spec, open_source(folder), tmp_path / "packed", order, seen, silent)
    full = error_rate(registry, model, "tiny")
    assert error_rate(registry, model, str(tmp_path / "packed")) <= full + LOSS
