"""A constraint against llguidance's own step-by-step answers, and the tokens it works with against the model's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kaminari_core.config import EngineConfig
from kaminari_core.errors import EngineError, RequestError
from kaminari_core.structured import grammars
from kaminari_core.structured.constraint import Constraint
from kaminari_core.structured.grammars import Grammars
from kaminari_core.structured.masks import Masks
from kaminari_core.structured.structure import Structure
from kaminari_core.structured.vocabulary import TokenTable
from kaminari_core.testing import TinyModel
from kaminari_core.text import ByteDetokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["a", "ab"]}}, "required": ["n"]}


class Wordy(TinyModel):
    """Bytes, then some words, then two end tokens among tokens without text; `words` replaces the bytes as well."""

    WORDS = (b'{"', b'{"n', b'":', b"12", b"12}", b'"s', b"\xc3", b"a", b'{"n')

    def __init__(self, words: Mapping[int, bytes] | None = None) -> None:
        super().__init__(EngineConfig(device="cpu", compile=False))
        self.words = dict(words or {**{byte: bytes([byte]) for byte in range(256)}, **dict(enumerate(self.WORDS, 260))})
        self.shape = replace(self.shape, vocabulary=290, end_tokens=(256, 270))

    def detokenizer(self) -> ByteDetokenizer:
        """See Wordy."""
        return ByteDetokenizer(self.words)


@pytest.fixture(scope="module")
def wordy() -> Grammars:
    return Grammars(Wordy())


def allowed(constraint: Constraint, guess: list[int] | None = None) -> list[set[int]]:
    """The tokens of each mask."""
    masks = Masks(len(guess or []) + 1, 290, torch.device("cpu"))
    used = masks.write(constraint, guess or [], 0)
    return [set((~row).nonzero()[:, 0].tolist()) for row in masks.forbidden(used)]


def walk(constraint: Constraint, draw: random.Random, steps: int) -> list[int]:
    """Take random tokens that may come, until nothing may."""
    taken: list[int] = []
    for _ in range(steps):
        token = draw.choice(sorted(allowed(constraint)[0]))
        constraint.accept(token)
        taken.append(token)
        if constraint.is_stopped:
            break
    return taken


def test_end_tokens_may_come_where_the_reply_is_valid_and_nowhere_else(wordy: Grammars) -> None:
    constraint = wordy.constraint(Structure.regex("[0-9]{2,3}"))
    digits = set(b"0123456789")
    assert allowed(constraint) == [digits | {263}]
    constraint.accept(ord("7"))
    assert (constraint.is_satisfied, allowed(constraint)) == (False, [digits | {263}])
    constraint.accept(ord("8"))
    assert (constraint.is_satisfied, constraint.is_stopped) == (True, False)
    assert allowed(constraint) == [digits | {256, 270}]
    constraint.accept(270)
    assert constraint.is_stopped
    assert constraint.is_satisfied


def test_tokens_of_several_characters_and_parts_of_characters(wordy: Grammars) -> None:
    begun = wordy.constraint(Structure.json_schema(SCHEMA))
    assert allowed(begun) == [{ord("{"), 260, 261, 268}]
    begun.accept(268)
    assert allowed(begun) == [{ord('"'), 262}]
    letters = wordy.constraint(Structure.regex("(é|ä)+"))
    assert allowed(letters) == [{0xC3, 266}]
    letters.accept(266)
    assert (allowed(letters), letters.is_satisfied) == ([{0xA9, 0xA4}], False)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_looking_ahead_changes_nothing_and_tells_what_stepping_would(wordy: Grammars, seed: int) -> None:
    draw = random.Random(seed)
    structure = draw.choice(
        [Structure.json_schema(SCHEMA), Structure.regex("(ab|a)*[0-9]{0,3}"), Structure.choice(["ab", "a"])]
    )
    constraint, twin, scout = (wordy.constraint(structure) for _ in range(3))
    for token in walk(scout, draw, draw.randrange(1, 6)):
        constraint.accept(token)
        twin.accept(token)
    if constraint.is_stopped:
        return
    guess = walk(scout, draw, 4)
    wrong = [*guess, draw.randrange(290)]
    assert constraint.allowed(guess) == len(guess)
    assert constraint.allowed(wrong) >= len(guess)
    before = allowed(constraint)
    seen = allowed(constraint, guess)
    assert allowed(constraint) == before
    for index, token in enumerate(guess):
        assert seen[index] == allowed(twin)[0]
        twin.accept(token)
        constraint.accept(token)
        assert (constraint.is_stopped, constraint.is_satisfied) == (twin.is_stopped, twin.is_satisfied)
    if not twin.is_stopped:
        assert seen[len(guess)] == allowed(twin)[0]


def test_a_token_that_may_not_come_is_an_error_of_the_row(wordy: Grammars) -> None:
    constraint = wordy.constraint(Structure.regex("ab"))
    with pytest.raises(EngineError, match="cannot be continued within its grammar"):
        constraint.accept(ord("x"))
    assert not constraint.is_satisfied


def test_a_vocabulary_that_cannot_go_on_is_an_error_of_the_row() -> None:
    letters = Grammars(Wordy({letter: bytes([letter]) for letter in b"abc"}))
    with pytest.raises(RequestError, match="cannot be enforced"):
        letters.constraint(Structure.regex("[0-9]"))
    constraint = letters.constraint(Structure.regex("ab[0-9]"))
    constraint.accept(ord("a"))
    constraint.accept(ord("b"))
    with pytest.raises(EngineError, match="cannot be continued within its grammar"):
        allowed(constraint)


def test_grammars_are_compiled_once_for_each_content_and_few_are_kept(
    wordy: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MOST_GRAMMARS", 3)
    compiled = Grammars(Wordy())
    first = compiled.constraint(Structure.regex("a+", "one name"))
    second = compiled.constraint(Structure.regex("a+", "another"))
    assert len(compiled) == 1
    first.accept(ord("a"))
    assert (first.is_satisfied, second.is_satisfied) == (True, False)
    for pattern in ("b", "c", "d"):
        compiled.constraint(Structure.regex(pattern))
    assert len(compiled) == 3


@pytest.mark.parametrize("structure", [Structure.regex("a{0,2}"), Structure.regex("")])
def test_nothing_is_a_reply_where_the_pattern_says_so(wordy: Grammars, structure: Structure) -> None:
    constraint = wordy.constraint(structure)
    assert {256, 270} <= allowed(constraint)[0]
    assert constraint.is_satisfied


def test_the_table_of_tokens_has_the_models_bytes_and_no_text_of_special_tokens() -> None:
    model = Wordy()
    table = TokenTable(model.shape, model.detokenizer())
    assert table.tokens[261] == b'{"n'
    assert {table.tokens[token] for token in (256, 258, 270, 289)} == {b""}
    assert table.end_tokens == (256, 270)
    # An end token with text is an end all the same.
    model.words[256] = b"a"
    assert TokenTable(model.shape, model.detokenizer()).tokens[256] == b""


def test_a_model_without_end_tokens_ends_with_the_structure() -> None:
    model = Wordy()
    model.shape = replace(model.shape, end_tokens=())
    constraint = Grammars(model).constraint(Structure.regex("ab"))
    constraint.accept(ord("a"))
    assert allowed(constraint) == [{ord("b")}]
    constraint.accept(ord("b"))
    assert constraint.is_stopped
    assert constraint.is_satisfied


def test_digits_are_the_ten_ascii_ones_and_slashes_need_no_care(wordy: Grammars) -> None:
    constraint = wordy.constraint(Structure.regex(r"\d/\d"))
    for letter in b"1/":
        constraint.accept(letter)
    assert allowed(constraint) == [set(b"0123456789")]


@pytest.mark.parametrize("size", [287, 288, 289])
def test_masks_fit_vocabularies_of_any_size(size: int) -> None:
    model = Wordy()
    model.shape = replace(model.shape, vocabulary=size)
    masks = Masks(1, size, model.device)
    used = masks.write(Grammars(model).constraint(Structure.regex("[ab]+")), (), 0)
    forbidden = masks.forbidden(used)
    assert forbidden.shape == (1, size)
    assert set((~forbidden[0]).nonzero()[:, 0].tolist()) == {ord("a"), ord("b"), 267}
