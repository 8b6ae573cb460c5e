"""Replies that are held to a structure, on real engines: every one that ends by itself has the structure."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import pytest

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.flow import Event, Failed, Finished, Message, Request, Result, TextPart
from kaminari_core.protocols import Model
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.structured.structure import Structure
from kaminari_core.testing import EchoModel, TinyModel

RECEIPT = {
    "type": "object",
    "properties": {
        "shop": {"type": "string", "maxLength": 12},
        "paid": {"type": "boolean"},
        "total": {"type": "integer", "minimum": 0, "maximum": 99999},
        "lines": {"type": "array", "items": {"enum": ["milk", "bread"]}, "maxItems": 3},
    },
    "required": ["shop", "paid", "total", "lines"],
    "additionalProperties": False,
}


def open_engine(kind: Callable[[EngineConfig], Model], **settings: Any) -> Engine:
    config = EngineConfig(**{"slots": 4, "max_length": 512, "max_tokens": 200, "compile": False, **settings})
    model = kind(config)
    width = 1 if config.draft == "none" else config.draft_tokens + 1
    cache = StaticCache(model.shape, config.slots, config.max_length, model.device, model.dtype, width=width)
    return Engine("test", model, cache, ContinuousScheduler(config), config)


def ask(text: str, structure: Structure | None = None, **options: Any) -> Request:
    return Request((Message("user", (TextPart(text),)),), structure=structure, **options)


def together(engine: Engine, requests: Sequence[Request]) -> list[Result | Failed]:
    """Submit all at once and wait for all ends."""
    ends: dict[str, Result | Failed] = {}
    done = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ends[event.request_id] = event.result if isinstance(event, Finished) else event
            if len(ends) == len(requests):
                done.set()

    for request in requests:
        engine.submit(request, sink)
    assert done.wait(60), "not every request ended"
    return [ends[request.id] for request in requests]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    with open_engine(TinyModel) as engine:
        yield engine


@pytest.fixture(scope="module")
def echo() -> Iterator[Engine]:
    with open_engine(EchoModel) as engine:
        yield engine


def test_a_model_that_knows_no_json_writes_valid_json(tiny: Engine) -> None:
    result = tiny.generate(ask("read", Structure.json_schema(RECEIPT)))
    jsonschema.validate(json.loads(result.text), RECEIPT)
    assert (result.complete, result.finish_reason, result.finish_detail) == (True, "stop", "structure_complete")
