"""Speculative decoding: replies never depend on it, each row accepts its own count, and it pauses where it loses."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.draft import Gain
from kaminari_core.engine import Engine
from kaminari_core.errors import UsageError
from kaminari_core.flow import Event, Failed, Finished, Message, Request, Result, Sampling, TextPart
from kaminari_core.prompt_lookup import LONGEST_GRAM, SHORTEST_GRAM, GramIndex
from kaminari_core.protocols import Cache, LayerCall, Model, Step
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.testing import END_TOKEN, EchoModel, TinyModel, one_hot

CONFIG = EngineConfig(slots=4, max_length=512, max_tokens=80, compile=False, draft_auto=False)


class GuessingEcho(EchoModel):
    """An EchoModel whose draft head knows the script too, but guesses wrong before every fifth token of it."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.shape = dataclasses.replace(self.shape, draft_layers=1)
        self.widths: set[int] = set()

    def draft(self, step: Step, ends: torch.Tensor, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
        """Say what decode would say one position later."""
        self.widths.add(step.cursors.shape[1])
        rows = step.cursors.shape[0]
        lengths = cache.values[0, :rows, 0, 0, 0].long()
        following = step.cursors.gather(1, ends[:, None])[:, 0] + 2 - lengths
        script = cache.keys[0, :rows, 0, :, 0].long()
        said = script.gather(1, following.clamp(min=0, max=script.shape[1] - 1)[:, None])[:, 0]
        said = torch.where(following < lengths, said, END_TOKEN)
        return one_hot(torch.where(following % 5 == 0, ord("?"), said))


def _engine(model: Model, config: EngineConfig) -> Engine:
    width = 1 if config.draft == "none" else config.draft_tokens + 1
    cache = StaticCache(model.shape, config.slots, config.max_length, model.device, model.dtype, width=width)
    return Engine("test", model, cache, ContinuousScheduler(config), config)


def _ask(text: str, **options: object) -> Request:
    return Request((Message("user", (TextPart(text),)),), **options)  # type: ignore[arg-type]


def _together(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    ends: dict[str, Result] = {}
    done = threading.Event()

    def sink(event: Event) -> None:
        assert not isinstance(event, Failed), event
        if isinstance(event, Finished):
            ends[event.request_id] = event.result
            if len(ends) == len(requests):
                done.set()

    for request in requests:
        engine.submit(request, sink)
    assert done.wait(60)
    return [ends[request.id] for request in requests]


def _asks() -> list[Request]:
    """Greedy, seeded, penalized, biased, stopped, limited and logprob-reporting rows over texts that repeat themselves."""
    table = "| a | 1.00 |\n| b | 2.00 |\n| c | 1.00 |\n" * 3
    return [
        _ask(table, max_tokens=60, ignore_end=True),
        _ask("x" * 30, max_tokens=50),
        _ask(table, max_tokens=40, sampling=Sampling(temperature=0.3, seed=1), ignore_end=True),
        _ask("one two one two one two", max_tokens=40, sampling=Sampling(repetition_penalty=1.3)),
        _ask(table, max_tokens=33, sampling=Sampling(frequency_penalty=0.5, presence_penalty=0.2), ignore_end=True),
        _ask("x" * 30, max_tokens=50, sampling=Sampling(logprobs=2), ignore_end=True),
        _ask("again again again", max_tokens=1),
        _ask("again again again", max_tokens=2),
    ]


def _compare(drafted: Result, plain: Result) -> None:
    assert [token.id for token in drafted.tokens] == [token.id for token in plain.tokens]
    assert (drafted.text, drafted.finish_detail) == (plain.text, plain.finish_detail)
    assert drafted.usage == plain.usage
    for ours, theirs in zip(drafted.tokens, plain.tokens, strict=True):
        assert (ours.logprob is None) == (theirs.logprob is None)
        if ours.logprob is not None:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [other.token for other in ours.top] == [other.token for other in theirs.top]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_prompt_lookup_changes_no_reply_alone_or_in_a_batch(count: int) -> None:
    with _engine(TinyModel(CONFIG), CONFIG) as engine:
        plain = [engine.generate(ask) for ask in _asks()]
    config = dataclasses.replace(CONFIG, draft="prompt-lookup", draft_tokens=count)
    with _engine(TinyModel(config), config) as engine:
        alone = [engine.generate(ask) for ask in _asks()]
        together = _together(engine, _asks())
        stats = engine.stats()
    for drafted, expected in zip([*alone, *together], [*plain, *plain], strict=True):
        _compare(drafted, expected)
    assert sum(result.drafts.accepted for result in alone) > 20, "the tiny model does repeat itself"
    assert stats.drafts_proposed == sum(result.drafts.proposed for result in [*alone, *together])
    assert stats.slots_busy == 0


def test_accepted_guesses_save_steps_as_counted() -> None:
    """A script of period 4: after the first pair that recurs, every guess of three is right."""
    config = dataclasses.replace(CONFIG, draft="prompt-lookup", draft_tokens=3, max_length=256)
    text = "abcd" * 15
    with _engine(EchoModel(config), config) as engine:
        result = engine.generate(_ask(text, max_tokens=70))
        steps = engine.stats().steps
    assert result.text == text
    assert result.drafts.accepted > 40
    # One token comes from prefill, every other from a step: its own and the accepted guesses.
    assert steps + result.drafts.accepted + 1 == result.usage.completion_tokens


def test_guesses_stop_at_the_limits_of_the_row() -> None:
    """The cache has room for exactly the prompt and the reply, and the token limit falls inside a guess."""
    text = "abcd" * 20
    config = dataclasses.replace(CONFIG, draft="prompt-lookup", draft_tokens=7, max_length=81 + 30)
    with _engine(EchoModel(config), config) as engine:
        for limit in (1, 2, 9, 30, 31):
            result = engine.generate(_ask(text, max_tokens=limit))
            assert (result.text, result.finish_detail) == (text[:limit], "max_tokens")
        full = engine.generate(_ask(text, max_tokens=90))
    assert (full.text, full.finish_detail) == (text[:31], "context_full")


def test_a_stop_string_inside_a_guess_ends_the_reply_there() -> None:
    config = dataclasses.replace(CONFIG, draft="prompt-lookup", draft_tokens=7)
    with _engine(EchoModel(config), config) as engine:
        result = engine.generate(_ask("abcdefgh" * 8 + "stop" + "abcdefgh", stop=("efghs",)))
    assert (result.text, result.finish_detail) == ("abcdefgh" * 7 + "abcd", "stop_string")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_draft_head_guesses_and_each_row_accepts_its_own_count(count: int) -> None:
    config = dataclasses.replace(CONFIG, draft="mtp", draft_tokens=count)
    model = GuessingEcho(config)
    texts = ["a brown fox jumps", "b" * 37, "lazy dogs do not jump at all, they say", "0123456789" * 6, "xy", "z"]
    with _engine(model, config) as engine:
        results = _together(engine, [_ask(text) for text in texts])
        assert [result.text for result in results] == texts
        for text, result in zip(texts, results, strict=True):
            # Token n of the script is guessed wrong when 5 divides n, and guessed at all when a step asks for it.
            assert result.drafts.accepted <= len([n for n in range(1, len(text) + 1) if n % 5])
            assert result.drafts.accepted >= len(text) // 5 * min(count, 2) - count
        assert model.widths == ({1, count + 1} if count > 1 else {count + 1})
        assert engine.stats().slots_busy == 0


def test_a_model_without_a_draft_head_is_told_so() -> None:
    config = dataclasses.replace(CONFIG, draft="mtp")
    with pytest.raises(UsageError, match="prompt-lookup"):
        _engine(TinyModel(config), config)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 20), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_lookup_finds_the_latest_longest_recurrence(tokens: list[int], cut: int, count: int) -> None:
    """Against a search of the whole text for the longest run that ends it and occurs before."""
    index = GramIndex(tokens[:cut])
    index.extend(tokens[cut:])
    expected: list[int] = []
    for size in range(LONGEST_GRAM, SHORTEST_GRAM - 1, -1):
        starts = [start for start in range(len(tokens) - size) if tokens[start : start + size] == tokens[-size:]]
        if len(tokens) >= size and starts:
            expected = tokens[starts[-1] + size :][:count]
            break
    assert index.propose(count) == expected


def test_drafting_pauses_where_it_loses_and_is_tried_again() -> None:
    gain = Gain()
    for _ in range(Gain.PROBE):
        assert not gain.drafting(4), "plain steps are measured first"
        gain.note(4, drafted=False, tokens=4, seconds=0.01)
    for _ in range(Gain.WINDOW):
        assert gain.drafting(4)
        gain.note(4, drafted=True, tokens=5, seconds=0.02)
    assert gain.paused == (4,)
    for _ in range(Gain.PAUSE):
        assert not gain.drafting(4)
        gain.note(4, drafted=False, tokens=4, seconds=0.01)
    assert gain.drafting(4)
    assert gain.paused == ()


def test_drafting_goes_on_where_it_gains_and_counts_row_numbers_apart() -> None:
    gain = Gain()
    for rows, tokens in ((1, 3), (8, 9)):
        for _ in range(Gain.PROBE):
            gain.note(rows, drafted=False, tokens=rows, seconds=0.01)
        for _ in range(3 * Gain.WINDOW):
            gain.note(rows, drafted=True, tokens=tokens, seconds=0.02)
    assert gain.paused == (8,), "three tokens in twice the time gain for one row, nine do not for eight"
