"""Replies that are held to a structure, on real engines: every one that ends by itself has the structure."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import pytest
import torch

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.errors import EngineError, RequestError
from kaminari_core.flow import Delta, Event, Failed, Finished, Message, Request, Result, Sampling, TextPart
from kaminari_core.protocols import Cache, LayerCall, Model, Step
from kaminari_core.sampling import logprobs
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.structured.structure import Structure
from kaminari_core.testing import END_TOKEN, EchoModel, TinyModel
from kaminari_core.text import ByteDetokenizer
from tests.structured.schemas import random_schema

RECEIPT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shop": {"type": "string", "maxLength": 12},
        "paid": {"type": "boolean"},
        "total": {"type": "integer", "minimum": 0, "maximum": 99999},
        "lines": {"type": "array", "items": {"enum": ["milk", "bread"]}, "maxItems": 3},
    },
    "required": ["shop", "paid", "total", "lines"],
}
DOCUMENT = '{"shop": "Müller\\n", "paid": true, "total": 1204, "lines": ["milk", "bread", "milk"]}'


class DraftingTiny(TinyModel):
    """A TinyModel with a draft head that guesses at random, now and then what a document has."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.shape = dataclasses.replace(self.shape, draft_layers=1)
        self._draw = torch.Generator().manual_seed(0)

    def draft(self, step: Step, ends: torch.Tensor, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
        """Any of a few tokens."""
        letters = torch.tensor([*b'{":,}a1 ', END_TOKEN])
        guess = letters[torch.randint(len(letters), (step.cursors.shape[0],), generator=self._draw)]
        return torch.nn.functional.one_hot(guess, self.shape.vocabulary).float()


class Letters(TinyModel):
    """A TinyModel whose vocabulary has no digits."""

    def detokenizer(self) -> ByteDetokenizer:
        """Token n is the byte n, but for digits."""
        return ByteDetokenizer({byte: bytes([byte]) for byte in range(256) if byte not in b"0123456789"})


def open_engine(kind: Callable[[EngineConfig], Model], **settings: Any) -> Engine:
    config = EngineConfig(
        **{
            "slots": 4, "max_length": 512, "max_tokens": 200, "compile": False, "draft_auto": False, "device": "cpu", **settings
        }
    )  # fmt: skip
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
    assert done.wait(120), "not every request ended"
    return [ends[request.id] for request in requests]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    with open_engine(TinyModel) as engine:
        yield engine


@pytest.fixture(scope="module")
def echo() -> Iterator[Engine]:
    with open_engine(EchoModel) as engine:
        yield engine


def mixed() -> list[Request]:
    """Requests with and without structures, greedy and drawn, with everything that changes scores."""
    drawn = Sampling(temperature=1.0, seed=7)
    changed = Sampling(
        temperature=0.8, top_p=0.9, top_k=40, seed=3, repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=0.5, logit_bias={ord("{"): -100.0, ord("x"): 100.0}, logprobs=2,
    )  # fmt: skip
    receipt = Structure.json_schema(RECEIPT)
    return [
        ask("one", receipt),
        ask("two", max_tokens=60),
        ask("three", receipt, sampling=drawn),
        ask("four", sampling=drawn, max_tokens=60),
        ask("five", receipt, sampling=changed),
        ask("six", Structure.regex(r"[A-Z]{3}-\d{4}(,[a-z]{2}){3}")),
        ask("seven", Structure.choice(["yes", "no", "né"]), sampling=Sampling(temperature=2.0, seed=1)),
        ask("eight", Structure.regex("[ab]{20,40}"), sampling=drawn),
    ]


@pytest.fixture(scope="module")
def plain_replies(tiny: Engine) -> list[Result]:
    return [tiny.generate(request) for request in mixed()]


def test_a_model_that_knows_no_json_writes_valid_json(plain_replies: Sequence[Result]) -> None:
    for index in (0, 2, 4):
        result = plain_replies[index]
        jsonschema.validate(json.loads(result.text), RECEIPT)
        assert (result.complete, result.finish_reason, result.finish_detail) == (True, "stop", "structure_complete")
    assert re.fullmatch(r"[A-Z]{3}-[0-9]{4}(,[a-z]{2}){3}", plain_replies[5].text)
    assert plain_replies[6].text in ("yes", "no", "né")
    assert re.fullmatch("[ab]{20,40}", plain_replies[7].text)
    assert [plain_replies[index].complete for index in (1, 3)] == [None, None]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"draft": "prompt-lookup", "draft_tokens": 4},
        {"kind": DraftingTiny, "draft": "mtp"},
        {"kind": DraftingTiny, "draft": "mtp", "draft_tokens": 1, "slots": 2},
    ],
    ids=str,
)
def test_neighbours_and_drafts_change_no_reply(plain_replies: Sequence[Result], settings: dict[str, Any]) -> None:
    kind = settings.pop("kind", TinyModel)
    with open_engine(kind, **settings) as engine:
        ends = together(engine, mixed())
        proposed = engine.stats().drafts_proposed
    for alone, end in zip(plain_replies, ends, strict=True):
        assert isinstance(end, Result)
        assert (end.text, end.finish_detail, end.complete) == (alone.text, alone.finish_detail, alone.complete)
        assert [token.id for token in end.tokens] == [token.id for token in alone.tokens]
    assert (proposed > 0) == (settings.get("draft", "none") != "none")


def test_a_reply_that_has_the_structure_by_itself_is_left_alone(echo: Engine) -> None:
    request = ask(DOCUMENT, Structure.json_schema(RECEIPT))
    events = list(echo.stream(request))
    assert "".join(event.text for event in events if isinstance(event, Delta)) == DOCUMENT
    assert isinstance(events[-1], Finished)
    assert events[-1].result.text == DOCUMENT
    # The end is known with the last brace; no step is spent on an end token.
    assert events[-1].result.usage.completion_tokens == len(DOCUMENT.encode())


def test_where_more_may_come_the_model_decides_when_to_end(echo: Engine) -> None:
    result = echo.generate(ask("123", Structure.regex(r"\d+")))
    assert (result.text, result.finish_detail, result.complete) == ("123", "end_token", True)
    result = echo.generate(ask("", Structure.regex(r"\d*")))
    assert (result.text, result.finish_detail, result.complete) == ("", "end_token", True)


def test_guesses_outside_of_the_grammar_are_not_verified() -> None:
    class Stubborn(DraftingTiny):
        def draft(self, step: Step, ends: torch.Tensor, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.full(ends.shape, ord("x")), self.shape.vocabulary).float()

    with open_engine(Stubborn, draft="mtp") as engine:
        free, held = together(engine, [ask("a", max_tokens=20), ask("b", Structure.regex("[0-9]{20}"))])
    assert isinstance(free, Result)
    assert isinstance(held, Result)
    assert (free.drafts.proposed > 0, held.drafts.proposed, len(held.text)) == (True, 0, 20)


def test_guesses_inside_of_the_grammar_save_steps() -> None:
    with open_engine(EchoModel, draft="prompt-lookup") as engine:
        echoed = engine.generate(ask(DOCUMENT + " " + DOCUMENT, Structure.json_schema(RECEIPT)))
        steps = engine.stats().steps
    assert echoed.text == DOCUMENT
    assert echoed.drafts.accepted > 20
    assert steps < echoed.usage.completion_tokens / 2


@pytest.mark.parametrize(
    ("options", "detail", "text", "complete"),
    [
        ({"max_tokens": 10}, "max_tokens", DOCUMENT[:10], False),
        ({"stop": ("paid",)}, "stop_string", DOCUMENT[: DOCUMENT.index("paid")], False),
        ({"stop": ("not there",)}, "structure_complete", DOCUMENT, True),
        ({"max_tokens": len(DOCUMENT.encode())}, "structure_complete", DOCUMENT, True),
    ],
    ids=str,
)
def test_only_a_limit_or_a_stop_string_cuts_the_structure_and_it_is_said(
    echo: Engine, options: dict[str, Any], detail: str, text: str, complete: bool
) -> None:
    result = echo.generate(ask(DOCUMENT, Structure.json_schema(RECEIPT), **options))
    assert (result.finish_detail, result.text, result.complete) == (detail, text, complete)


def test_a_limit_that_cuts_nothing_off_leaves_a_complete_reply(echo: Engine) -> None:
    result = echo.generate(ask("12345", Structure.regex(r"\d+"), max_tokens=3))
    assert (result.text, result.finish_reason, result.complete) == ("123", "length", True)


def test_a_document_that_repeats_itself_is_no_loop_unless_the_request_says_so() -> None:
    zeros = json.dumps([0] * 130)
    held = Structure.json_schema({"type": "array", "items": {"const": 0}})
    with open_engine(EchoModel, max_length=1024, max_tokens=500) as engine:
        kept = engine.generate(ask(zeros, held, task="ocr"))
        cut = engine.generate(ask(zeros, held, loop_guard=True))
    assert (kept.text, kept.complete) == (zeros, True)
    assert (cut.finish_detail, cut.complete) == ("loop", False)


def test_a_cancelled_reply_is_not_complete() -> None:
    with open_engine(TinyModel, max_length=4096, max_tokens=4000) as engine:
        begun, ended = threading.Event(), threading.Event()
        events: list[Event] = []

        def sink(event: Event) -> None:
            events.append(event)
            begun.set()
            if isinstance(event, Finished | Failed):
                ended.set()

        request = ask("x", Structure.regex("[a-z]{3500}"))
        engine.submit(request, sink)
        assert begun.wait(60)
        engine.cancel(request.id)
        assert ended.wait(60)
    assert isinstance(events[-1], Finished)
    assert (events[-1].result.finish_detail, events[-1].result.complete) == ("cancelled", False)


def test_log_probabilities_are_those_of_the_models_own_logits(tiny: Engine) -> None:
    """The mask changes what is chosen, not what the model is said to have thought."""
    held = tiny.generate(ask("one", Structure.regex("[0-9]{3}"), sampling=Sampling(logprobs=5)))
    free = tiny.generate(ask("one", sampling=Sampling(logprobs=5), max_tokens=1))
    said, thought = held.tokens[0].top, free.tokens[0].top
    assert [each.token for each in said] == [each.token for each in thought]
    assert [each.logprob for each in said] == pytest.approx([each.logprob for each in thought], abs=1e-5)
    model = TinyModel(tiny.config)
    cache = StaticCache(model.shape, 1, 64, model.device, model.dtype)
    prepared = model.prepare(ask("one"))
    with torch.inference_mode():
        logits = model.prefill(model.embed(prepared), 0, prepared.length, cache, 0)
    first = held.tokens[0]
    assert first.logprob == pytest.approx(logprobs(logits, first.id, 0)[0], abs=1e-5)
    assert first.id == max(range(ord("0"), ord("9") + 1), key=lambda token: float(logits[token]))


def test_a_structure_that_cannot_be_enforced_is_found_in_a_worker(tiny: Engine) -> None:
    found: list[tuple[str, Event]] = []
    done = threading.Event()

    def sink(event: Event) -> None:
        found.append((threading.current_thread().name, event))
        done.set()

    steps = tiny.stats().steps
    tiny.submit(ask("x", Structure.regex("(", "pattern")), sink)
    assert done.wait(60)
    [(thread, event)] = found
    assert "prepare" in thread
    assert isinstance(event, Failed)
    assert isinstance(event.error, RequestError)
    assert event.error.param == "pattern"
    assert tiny.stats().steps == steps
    with pytest.raises(RequestError, match="pattern cannot be enforced"):
        tiny.preview(ask("x", Structure.regex("(", "pattern")))


def test_going_on_past_the_end_and_a_structure_exclude_each_other(tiny: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        tiny.generate(ask("x", Structure.regex("a"), ignore_end=True))
    assert caught.value.param == "ignore_eos"


def test_a_grammar_at_a_dead_end_fails_its_own_row_alone() -> None:
    with open_engine(Letters) as engine:
        stuck, free, held = together(
            engine,
            [
                ask("x", Structure.regex("[a-c]{5}[0-9]")),
                ask("y", max_tokens=20),
                ask("z", Structure.regex("[a-c]{12}")),
            ],
        )
        again = engine.generate(ask("y", max_tokens=20))
    assert isinstance(stuck, Failed)
    assert isinstance(stuck.error, EngineError)
    assert "cannot be continued within its grammar" in str(stuck.error)
    assert isinstance(free, Result)
    assert free.text == again.text
    assert isinstance(held, Result)
    assert re.fullmatch("[a-c]{12}", held.text)


def test_rows_without_a_structure_pay_nothing() -> None:
    with open_engine(TinyModel) as engine:
        together(engine, [ask(str(number), max_tokens=20) for number in range(4)])
        assert engine.stats().mask_copies == 0
        engine.generate(ask("x", Structure.regex("[ab]{8}")))
        alone = engine.stats().mask_copies
        together(engine, [ask(str(number), Structure.regex("[ab]{8}")) for number in range(4)])
        assert engine.stats().mask_copies - alone <= 4 * 8
    # One for the first token, which prefill gives, and one for each step.
    assert alone == 8


@pytest.mark.slow
def test_the_library_is_imported_when_the_first_request_asks_for_it() -> None:
    script = """
import sys
from kaminari_core.structured.structure import Structure
from kaminari_core.testing import TinyModel
from tests.structured.test_engine import ask, open_engine
with open_engine(TinyModel) as engine:
    engine.generate(ask("x", max_tokens=4))
    assert "llguidance" not in sys.modules
    assert engine.generate(ask("x", Structure.regex("a"))).text == "a"
    assert "llguidance" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def fuzz(kind: Callable[[EngineConfig], Model], seeds: range, **settings: Any) -> int:
    """Ask for a document of each random schema; returns how many were complete, all of which are checked."""
    schemas = [random_schema(seed) for seed in seeds]
    requests = [
        ask("read", Structure.json_schema(schema), sampling=Sampling(temperature=float(seed % 2), seed=seed))
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    with open_engine(kind, slots=8, max_length=1024, max_tokens=400, **settings) as engine:
        ends = together(engine, requests)
    complete = 0
    for schema, end in zip(schemas, ends, strict=True):
        assert isinstance(end, Result), (schema, end)
        assert end.complete or end.finish_reason == "length", (schema, end.text)
        if end.complete:
            jsonschema.validate(json.loads(end.text), schema, cls=jsonschema.Draft202012Validator)
            complete += 1
    return complete


def test_documents_of_random_schemas_are_valid() -> None:
    # Those that are not complete repeat a digit until their limit, greedily.
    assert fuzz(DraftingTiny, range(20), draft="mtp") >= 16


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["none", "prompt-lookup", "mtp"])
def test_documents_of_200_random_schemas_are_valid(draft: str) -> None:
    assert fuzz(DraftingTiny, range(200), draft=draft) >= 180
