"""The bundled readers, which know no JSON, held to structures while they look at pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.flow import ImagePart, Message, Request, Result, Sampling, TextPart
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_core.structured.structure import Structure
from tests.structured.schemas import random_schema
from tests.structured.test_engine import RECEIPT, together

LINES = Path(__file__).parents[1] / "qwen3vl" / "data" / "lines"
TRUTHS: dict[str, str] = json.loads((LINES / "truths.json").read_text(encoding="utf-8"))
TEMPLATE = {"shop": "", "lines": [{"name": "", "price": ""}]}
READERS = ("qwen3vl", "glmocr")


def open_reader(name: str, **settings: Any) -> Engine:
    config = EngineConfig(
        **{
            "device": "cpu", "dtype": "float32", "compile": False, "slots": 6, "max_length": 1024, "max_tokens": 120,
            "draft": "mtp" if name == "glmocr" else "prompt-lookup", "draft_auto": False, **settings,
        }
    )  # fmt: skip
    engine = open_engine(load_registry(only=frozenset({"core", name})), name, "tiny", config, silent)
    assert isinstance(engine, Engine)
    return engine


@pytest.fixture(scope="module", params=READERS)
def reader(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = open_reader(request.param)
    yield engine
    engine.close()


def ask(line: str, structure: Structure | None = None, **options: Any) -> Request:
    parts = ImagePart((LINES / line).read_bytes(), line), TextPart("Read all the text in the image.")
    return Request((Message("user", parts),), structure=structure, **options)


def results(engine: Engine, requests: list[Request]) -> list[Result]:
    ends = together(engine, requests)
    assert all(isinstance(end, Result) for end in ends), ends
    return [end for end in ends if isinstance(end, Result)]


def test_what_is_read_within_a_pattern_is_what_is_read_without(reader: Engine) -> None:
    """A pattern that the text has by itself changes nothing, the end token included."""
    lines = list(TRUTHS)[:3]
    free = results(reader, [ask(line) for line in lines])
    held = results(reader, [ask(line, Structure.regex(".+")) for line in lines])
    assert [result.text for result in held] == [result.text for result in free]
    assert {(result.finish_detail, result.complete) for result in held} == {("end_token", True)}
    assert {result.complete for result in free} == {None}


def test_pictures_documents_patterns_and_free_replies_share_a_batch(reader: Engine) -> None:
    first, *others = list(TRUTHS)[:6]
    alone = reader.generate(ask(first))
    free, receipt, pattern, choice, template, drawn = results(
        reader,
        [
            ask(first),
            ask(others[0], Structure.json_schema(RECEIPT)),
            ask(others[1], Structure.regex("[A-Z]{2}[0-9]{2}"), sampling=Sampling(logprobs=1)),
            ask(others[2], Structure.choice(["invoice", "receipt"])),
            ask(others[3], Structure.template(TEMPLATE)),
            ask(others[4], Structure.json_schema(RECEIPT), sampling=Sampling(temperature=1.0, seed=5)),
        ],
    )
    assert (free.text, free.complete) == (alone.text, None)
    for result in (receipt, drawn):
        jsonschema.validate(json.loads(result.text), RECEIPT)
    assert re.fullmatch("[A-Z]{2}[0-9]{2}", pattern.text)
    assert len(pattern.tokens) == 4
    assert choice.text in ("invoice", "receipt")
    # Its strings have no bound: a reader that does not know where to close one writes until its limit.
    assert template.complete or template.finish_reason == "length"
    assert template.text.startswith("{")


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_documents_of_200_random_schemas_read_from_pictures_are_valid(name: str) -> None:
    schemas = [random_schema(seed) for seed in range(1000, 1200)]
    lines = list(TRUTHS)
    engine = open_reader(name, max_tokens=400)
    try:
        ends = results(
            engine,
            [
                ask(
                    lines[index % len(lines)],
                    Structure.json_schema(schema),
                    sampling=Sampling(temperature=float(index % 2), seed=index),
                )
                for index, schema in enumerate(schemas)
            ],
        )
    finally:
        engine.close()
    for schema, end in zip(schemas, ends, strict=True):
        assert end.complete or end.finish_reason == "length", (schema, end.text)
        if end.complete:
            jsonschema.validate(json.loads(end.text), schema, cls=jsonschema.Draft202012Validator)
    assert sum(bool(end.complete) for end in ends) >= 180
