"""Sampling against transformers' logits processors, the OpenAI formula and counting."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kaminari_core.errors import RequestError
from kaminari_core.flow import Sampling
from kaminari_core.sampling import RowSampler, logprobs, validate

CPU = torch.device("cpu")
VOCABULARY = 50


def random_logits(seed: int, size: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def sampler(prompt: tuple[int, ...] = (), size: int = VOCABULARY, **settings: Any) -> RowSampler:
    return RowSampler(Sampling(**settings), prompt, size, CPU)


def draws(row: RowSampler, logits: torch.Tensor, count: int) -> list[int]:
    return [int(row.choose(logits)) for _ in range(count)]


def chances_of_transformers(logits: torch.Tensor, *processors: Any, tokens: tuple[int, ...] = (0,)) -> torch.Tensor:
    return LogitsProcessorList(processors)(torch.tensor([tokens]), logits[None].clone())[0].softmax(dim=-1)


def test_greedy_is_the_argmax_and_says_so() -> None:
    logits = random_logits(0)
    row = sampler()
    assert row.is_greedy
    assert int(row.choose(logits)) == int(logits.argmax())
    assert row.choose(logits).dtype == torch.int64
    assert row.choose(logits).shape == ()
    assert sampler(logprobs=5).is_greedy
    for settings in ({"temperature": 0.5}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1},
                     {"frequency_penalty": -0.1}, {"logit_bias": {1: 1.0}}):  # fmt: skip
        assert not sampler(**settings).is_greedy


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        row = sampler((3, 3, 7), repetition_penalty=penalty)
        row.accept(11)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[3, 3, 7, 11]]), logits[None].clone())[0]
        assert torch.equal(row.penalize(logits), expected)
        assert int(row.choose(logits)) == int(expected.argmax())


def test_presence_and_frequency_follow_the_openai_formula() -> None:
    logits = random_logits(1)
    row = sampler((5, 6), presence_penalty=0.5, frequency_penalty=0.25)
    for token in (9, 9, 9, 4):
        row.accept(token)
    expected = logits.clone()
    expected[9] -= 3 * 0.25 + 0.5
    expected[4] -= 0.25 + 0.5
    assert torch.allclose(row.penalize(logits), expected)


def test_bias_adds_and_can_forbid_or_force() -> None:
    logits = random_logits(2)
    best, other = int(logits.argmax()), int(logits.argmin())
    assert int(sampler(logit_bias={best: -100}).choose(logits)) == int(logits.topk(2).indices[1])
    assert int(sampler(logit_bias={other: 100}).choose(logits)) == other
    assert set(draws(sampler(temperature=1.0, logit_bias={other: 100}), logits, 20)) == {other}


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(3)
    before = logits.clone()
    row = sampler((1, 2), temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.2, presence_penalty=1.0,
                  logit_bias={3: 2.0}, seed=1)  # fmt: skip
    row.choose(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("settings", "processors"),
    [
        ({"temperature": 1.0}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"temperature": 1.5, "top_k": 12, "top_p": 0.7},
         [TemperatureLogitsWarper(1.5), TopKLogitsWarper(12), TopPLogitsWarper(0.7)]),
    ],
    ids=["plain", "temperature", "top-k", "top-p", "all"],
)  # fmt: skip
def test_draws_are_distributed_as_transformers_processors_say(settings: dict[str, Any], processors: list[Any]) -> None:
    logits = random_logits(4)
    expected = chances_of_transformers(logits, *processors)
    count = 6000
    counted = Counter(draws(sampler(seed=7, **settings), logits, count))
    assert all(expected[token] > 0 for token in counted)
    # Pearson's chi-square over the tokens that are expected often enough, the rest together in one cell.
    often = [token for token in range(VOCABULARY) if expected[token] * count >= 5]
    cells = [(counted[token], float(expected[token]) * count) for token in often]
    rest = count - sum(observed for observed, _ in cells), count - sum(wanted for _, wanted in cells)
    cells += [rest] if rest[1] > 1 else []
    statistic = sum((observed - wanted) ** 2 / wanted for observed, wanted in cells)
    freedom = len(cells) - 1
    # Chi-square has mean f and variance 2f; five deviations above the mean is far beyond chance.
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.9, 0.999])
def test_the_kept_set_is_the_smallest_that_reaches_top_p(top_p: float) -> None:
    for seed in range(20):
        logits = random_logits(seed, 8)
        expected = {
            token for token, chance in enumerate(chances_of_transformers(logits, TopPLogitsWarper(top_p))) if chance
        }
        drawn = set(draws(sampler(size=8, temperature=1.0, top_p=top_p, seed=seed), logits, 300))
        assert drawn <= expected
        assert max(drawn, key=lambda token: logits[token]) == int(logits.argmax())
        chances = logits.softmax(dim=-1).sort(descending=True).values
        assert len(expected) == int((chances.cumsum(0) < top_p).sum()) + 1


def test_top_k_of_one_and_beyond_the_vocabulary() -> None:
    logits = random_logits(5)
    assert set(draws(sampler(temperature=2.0, top_k=1), logits, 30)) == {int(logits.argmax())}
    assert len(set(draws(sampler(temperature=50.0, top_k=10_000), logits, 300))) > 30


def test_a_tiny_temperature_is_greedy_and_a_low_one_does_not_overflow() -> None:
    logits = random_logits(6) * 100
    for temperature in (1e-40, 1e-6, 2e-5, 1e-3):
        assert set(draws(sampler(temperature=temperature), logits, 5)) == {int(logits.argmax())}


def test_half_precision_logits_are_taken() -> None:
    logits = random_logits(7).bfloat16()
    assert 0 <= int(sampler(temperature=1.0, top_p=0.9).choose(logits)) < VOCABULARY


def test_a_seed_gives_the_same_tokens_whatever_else_is_drawn() -> None:
    logits = torch.zeros(VOCABULARY)
    alone = draws(sampler(temperature=1.0, seed=42), logits, 12)
    assert draws(sampler(temperature=1.0, seed=42), logits, 12) == alone
    seeded, unseeded, other = (
        sampler(temperature=1.0, seed=42),
        sampler(temperature=1.0),
        sampler(temperature=1.0, seed=3),
    )
    mixed = []
    for _ in range(12):
        unseeded.choose(logits)
        mixed.append(int(seeded.choose(logits)))
        other.choose(logits)
        torch.rand(3)
    assert mixed == alone
    assert draws(sampler(temperature=1.0, seed=43), logits, 12) != alone
    for seed in (0, -1, -(2**63), 2**64 - 1):
        assert len(draws(sampler(temperature=1.0, seed=seed), logits, 2)) == 2


def test_without_a_seed_runs_differ_even_after_manual_seed() -> None:
    logits = torch.zeros(VOCABULARY)
    runs = set()
    for _ in range(5):
        torch.manual_seed(0)
        runs.add(tuple(draws(sampler(temperature=1.0), logits, 12)))
    assert len(runs) == 5


def test_logprobs_are_of_the_unmodified_logits() -> None:
    logits = random_logits(8).bfloat16()
    expected = logits.double().log_softmax(dim=-1)
    own, top = logprobs(logits, 17, 4)
    assert own == pytest.approx(float(expected[17]), abs=1e-5)
    assert [token for token, _ in top] == expected.topk(4).indices.tolist()
    assert [value for _, value in top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-5)
    assert logprobs(logits, 17, 0) == (own, [])
    assert len(logprobs(logits, 17, 20)[1]) == 20


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 10**400}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**400}, "logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
        ({"logit_bias": {999_999: 5}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {3.0: -100}}, "logit_bias"),
        ({"logit_bias": {3: math.inf}}, "logit_bias"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
        ({"logit_bias": {3: 1e39}}, "logit_bias"),
        ({"logit_bias": {3: -(10**400)}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        validate(Sampling(**settings), VOCABULARY)
    assert caught.value.param == field


def test_the_ends_of_the_ranges_are_accepted() -> None:
    validate(Sampling(), VOCABULARY)
    validate(Sampling(temperature=100, top_k=2**63 - 1, repetition_penalty=100), VOCABULARY)
    validate(
        Sampling(temperature=2.0, top_p=1.0, top_k=VOCABULARY, seed=2**64 - 1, repetition_penalty=0.01, presence_penalty=-2,
                 frequency_penalty=2, logit_bias={0: -100, VOCABULARY - 1: 100}, logprobs=20),
        VOCABULARY,
    )  # fmt: skip
