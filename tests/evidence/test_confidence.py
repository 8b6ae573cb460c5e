"""Confidence: which tokens belong to a line and to a JSON value, what they are worth, and what asking for it costs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.errors import RequestError
from kaminari_core.evidence.calibration import Calibration
from kaminari_core.evidence.confidence import confidence_of, lines_with_confidence
from kaminari_core.evidence.json_values import leaves
from kaminari_core.flow import Message, Request, Sampling, TextPart, Token
from kaminari_core.live import Live
from kaminari_core.rows import choose, take
from kaminari_core.sampling import token_logprobs
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.structured.masks import Masks
from kaminari_core.testing import VOCABULARY, EchoModel, TinyModel


def tokens_of(*pieces: tuple[str | bytes, float]) -> list[Token]:
    """Tokens with these texts and probabilities."""
    data = [(piece.encode() if isinstance(piece, str) else piece, chance) for piece, chance in pieces]
    return [
        Token(index, raw.decode("utf-8", "replace"), raw, math.log(chance)) for index, (raw, chance) in enumerate(data)
    ]


def test_a_line_is_as_sure_as_the_tokens_that_wrote_it_and_ended_it() -> None:
    tokens = tokens_of(("TO", 0.9), ("TAL", 0.8), ("\n", 0.5), ("1.2", 0.6), ("0\n\n4", 0.7), ("", 0.01), ("2", 0.4))
    first, second, last = confidence_of("TOTAL\n1.20\n\n42", tokens).lines
    assert (first.index, first.text, second.index, second.text, last.index, last.text) == (
        (0, "TOTAL", 1, "1.20", 3, "42")
    )
    assert (first.mean, first.minimum, first.joint) == pytest.approx((2.2 / 3, 0.5, 0.36))
    assert (second.mean, second.minimum, second.joint) == pytest.approx((0.65, 0.6, 0.42))
    assert (last.mean, last.minimum, last.joint) == pytest.approx((0.55, 0.4, 0.28)), "the shared token counts twice"
    assert first.calibrated is None


def test_characters_spread_over_tokens_belong_to_each_of_them() -> None:
    raw = "a€b".encode()
    tokens = tokens_of((raw[:2], 0.9), (raw[2:3], 0.3), (raw[3:], 0.8))
    (line,) = confidence_of("a€b", tokens).lines
    assert line.minimum == pytest.approx(0.3)
    (cut,) = confidence_of("a", tokens).lines
    assert (cut.mean, cut.minimum) == pytest.approx((0.9, 0.9)), "the text was cut in front of the euro sign"


def test_a_calibration_is_applied_to_the_number_it_is_for() -> None:
    tokens = tokens_of(("a", 0.9), ("b", 0.6))
    for measure, claimed in (("mean", 0.75), ("minimum", 0.6), ("joint", 0.54)):
        calibration = Calibration(
            measure=measure,  # type: ignore[arg-type]
            temperature=2.0,
            samples=2,
            error_before=0,
            error_after=0,
        )
        (line,) = confidence_of("ab", tokens, calibration).lines
        assert line.calibrated == pytest.approx(calibration.apply(claimed))


def test_values_of_a_json_reply_have_paths_and_a_confidence_of_their_own() -> None:
    text = '```json\n{"shop": "A/B", "items": [{"n~": 12}, [], true], "x/y": null}\n```'
    pieces = ["```json\n{", '"shop": "', "A/", "B", '", "items": [{"n~": ', "1", "2", "}, [], ", "true", '], "x/y": ']
    chances = [0.5, 0.5, 0.9, 0.8, 0.7, 0.95, 0.6, 0.5, 0.99, 0.5, 0.75, 0.5]
    tokens = tokens_of(*zip([*pieces, "null", "}\n```"], chances, strict=True))
    fields = {field.path: field for field in confidence_of(text, tokens).fields}
    assert {path: field.value for path, field in fields.items()} == {
        "/shop": "A/B",
        "/items/0/n~0": 12,
        "/items/2": True,
        "/x~1y": None,
    }
    assert fields["/shop"].joint == pytest.approx(0.9 * 0.8 * 0.7), "the closing quote is a part of the value"
    assert (fields["/items/0/n~0"].mean, fields["/items/0/n~0"].minimum) == pytest.approx((0.775, 0.6))
    assert fields["/x~1y"].joint == pytest.approx(0.75)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.sampled_from([None, 2]), st.booleans())
def test_every_value_is_found_where_it_stands(value: Any, indent: int | None, escaped: bool) -> None:
    def flat(value: Any, path: str) -> list[tuple[str, Any]]:
        if isinstance(value, dict):
            escape = [(key.replace("~", "~0").replace("/", "~1"), inner) for key, inner in value.items()]
            return [leaf for key, inner in escape for leaf in flat(inner, f"{path}/{key}")]
        if isinstance(value, list):
            return [leaf for index, inner in enumerate(value) for leaf in flat(inner, f"{path}/{index}")]
        return [(path, value)]

    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    found = leaves(text)
    if not isinstance(value, dict | list):
        assert found == []
        return
    assert [(leaf.path, leaf.value) for leaf in found] == flat(value, "")
    for leaf in found:
        quoted = '"' if isinstance(leaf.value, str) else ""
        assert json.loads(quoted + text[leaf.start : leaf.stop]) == leaf.value


@pytest.mark.parametrize("text", ["", "plain", '{"a": ', "[1, 2", '"a"', "```", "[" * 100_000, "{} more"])
def test_what_is_no_json_object_or_list_has_no_fields(text: str) -> None:
    assert leaves(text) == []


def test_token_logprobs_are_those_of_the_softmax() -> None:
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(1)) * 8
    tokens = torch.tensor([[0, 49], [7, 7], [3, -1]])
    expected = logits.double().log_softmax(-1).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    assert token_logprobs(logits, tokens).double() == pytest.approx(expected, abs=1e-5)
    assert token_logprobs(torch.tensor([0.0, 100.0]), torch.tensor(1)) == 0, "never above certainty"


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.shapes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.names[name] += 1
        if args and isinstance(args[0], torch.Tensor):
            self.shapes[name] = list(args[0].shape)
        return function(*args, **kwargs or {})


def rows_of(*requests: dict[str, Any]) -> list[Live]:
    model = EchoModel(EngineConfig())
    made = []
    for settings in requests:
        request = Request((Message("user", (TextPart("ab"),)),), **settings)
        live = Live(
            model.prepare(request),
            lambda event: None,
            model.shape,
            model.detokenizer(),
            model.device,
            submitted=0.0,
            max_length=64,
            max_tokens=8,
        )
        made.append(live)
    return made


def test_rows_that_ask_for_nothing_pay_nothing_and_one_that_asks_pays_for_itself() -> None:
    logits = torch.randn(4, 1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    masks = Masks(4, VOCABULARY, torch.device("cpu"))

    def operations(*requests: dict[str, Any]) -> tuple[Operations, list[list[int]]]:
        rows = rows_of(*requests)
        with Operations() as counted:
            tokens, _ = choose(rows, logits, [[]] * 4, masks)
        return counted, tokens

    plain, expected = operations({}, {}, {}, {})
    assert not {"logsumexp", "gather", "_log_softmax"} & plain.names.keys()
    asked, tokens = operations({}, {}, {"confidence": True}, {})
    assert tokens == expected == logits.argmax(-1).tolist()
    assert asked.names["logsumexp"] == 1
    assert asked.shapes["logsumexp"] == [1, 1, VOCABULARY], "the other three rows are not looked at"
    together, _ = operations({"confidence": True}, {"confidence": True}, {"sampling": Sampling(logprobs=0)}, {})
    assert together.names["logsumexp"] == 1, "one operation for all that ask"
    assert together.names["_local_scalar_dense"] == asked.names["_local_scalar_dense"] == 0, (
        "nothing waits but the read"
    )


def test_a_row_gets_the_logprob_of_what_it_chose_whether_or_not_it_was_guessed() -> None:
    logits = torch.randn(2, 3, VOCABULARY, generator=torch.Generator().manual_seed(3))
    exact = logits.double().log_softmax(-1)
    greedy, drawn = rows_of({"confidence": True}, {"confidence": True, "sampling": Sampling(temperature=1.0, seed=5)})
    best = logits[0].argmax(-1).tolist()
    chosen, _ = choose([greedy, drawn], logits, [best[:2], []], Masks(8, VOCABULARY, torch.device("cpu")))
    take(greedy, chosen[0], logits[0], best[:2])
    take(drawn, chosen[1], logits[1], [])
    assert [token.id for token in greedy.reply.tokens] == best
    assert [token.logprob for token in greedy.reply.tokens] == pytest.approx(
        [float(exact[0, place, token]) for place, token in enumerate(best)], abs=1e-5
    )
    (token,) = drawn.reply.tokens
    assert token.logprob == pytest.approx(float(exact[1, 0, token.id]), abs=1e-5)


def ask(engine: Engine, texts: Sequence[str], **settings: Any) -> list[Any]:
    said = [Request((Message("user", (TextPart(text),)),), max_tokens=12, **settings) for text in texts]
    return [engine.generate(request) for request in said]


def test_an_engine_gives_confidence_to_those_who_ask() -> None:
    config = EngineConfig(compile=False, slots=2, max_length=256, dtype="float32")
    model = TinyModel(config)
    cache = StaticCache(model.shape, 2, 256, model.device, model.dtype)
    calibration = Calibration(measure="minimum", temperature=3.0, samples=2, error_before=0.0, error_after=0.0)
    with Engine("test", model, cache, ContinuousScheduler(config), config, calibration=calibration) as engine:
        (plain,) = ask(engine, ["hello"], ignore_end=True)
        (asked,) = ask(engine, ["hello"], ignore_end=True, confidence=True)
        (reported,) = ask(engine, ["hello"], ignore_end=True, sampling=Sampling(logprobs=3))
        (drawn,) = ask(engine, ["hello"], ignore_end=True, confidence=True, sampling=Sampling(temperature=1, seed=1))
    assert plain.confidence is None
    assert plain.tokens[0].logprob is None
    with pytest.raises(RequestError, match="did not ask"):
        lines_with_confidence(plain)
    assert asked.text == plain.text
    assert [token.logprob for token in asked.tokens] == pytest.approx(
        [token.logprob for token in reported.tokens], abs=1e-5
    )
    lines = lines_with_confidence(asked)
    assert (
        "\n".join(line.text for line in lines).strip()
        == "\n".join(line for line in asked.text.split("\n") if line.strip()).strip()
    )
    for line in lines:
        assert 0 <= line.joint <= line.minimum <= line.mean <= 1
        assert line.calibrated == calibration.apply(line.minimum)
    assert all(token.logprob is not None and token.logprob < 0 for token in drawn.tokens)
