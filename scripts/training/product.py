"""What the product itself reads with a checkpoint: the engine on the lines that tests read, with and without the draft head."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from kaminari_core.config import EngineConfig
from kaminari_core.flow import ImagePart, Message, Request, Result, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.registry import load_registry
from make_pages import sample_receipt
from training.evaluate import error_rate

LINES = Path("tests/qwen3vl/data/lines")
REPLY = 400


def read_lines(folder: Path = LINES) -> tuple[list[bytes], list[str]]:
    """Give the pictures that tests read, as files' bytes, and their texts."""
    truths: Mapping[str, str] = json.loads((folder / "truths.json").read_text())
    return [(folder / name).read_bytes() for name in truths], list(truths.values())


def read(checkpoint: Path, model: str, pictures: list[bytes], config: EngineConfig) -> tuple[list[Result], float]:
    """Read pictures one after the other with the task `ocr`; give the replies and the seconds they took."""
    engine = open_engine(load_registry(), model, str(checkpoint), config, lambda *_: None)
    try:
        prompt = TextPart(engine.tasks["ocr"])
        requests = [Request((Message("user", (ImagePart(data), prompt)),), max_tokens=REPLY) for data in pictures]
        engine.generate(requests[0])
        began = time.perf_counter()
        return [engine.generate(request) for request in requests[1:]], time.perf_counter() - began
    finally:
        engine.close()


def measure_product(checkpoint: Path, model: str, *, draft: bool) -> dict[str, object]:
    """Give error rates on the tests' lines and the sample receipt, and, with `draft`, how often guesses are right.

    Guessing never pauses here, so that the shares are those of all guesses. Raises RuntimeError when replies differ with it.
    """
    pictures, truths = read_lines()
    encoded = io.BytesIO()
    Image.fromarray(sample_receipt().pixels).save(encoded, "PNG")
    # The first one is read twice, to warm up, and counted once.
    pictures = [pictures[0], *pictures, encoded.getvalue()]
    plain = EngineConfig(device="cpu", dtype="float32", compile=False, slots=1)
    replies, seconds = read(checkpoint, model, pictures, plain)
    texts = [reply.text for reply in replies]
    result: dict[str, object] = {
        "lines": len(truths),
        "error_rate": round(error_rate(truths, texts[:-1]), 5),
        "exact": sum(truth == text for truth, text in zip(truths, texts[:-1], strict=True)),
        "sample_error_rate": round(error_rate([sample_receipt().text], texts[-1:]), 5),
        "seconds": round(seconds, 2),
    }
    for count in (1, 2, 3) if draft else ():
        config = EngineConfig(
            device="cpu", dtype="float32", compile=False, slots=1, draft="mtp", draft_tokens=count, draft_auto=False
        )
        guessed, seconds = read(checkpoint, model, pictures, config)
        if [reply.text for reply in guessed] != texts:
            raise RuntimeError(f"replies with {count} guessed tokens differ from those without")
        proposed = sum(reply.drafts.proposed for reply in guessed)
        accepted = sum(reply.drafts.accepted for reply in guessed)
        result[f"mtp, {count} guessed"] = {
            "proposed": proposed,
            "accepted": accepted,
            "acceptance": round(accepted / max(1, proposed), 4),
            "seconds": round(seconds, 2),
        }
    return result
