"""From the logits of one row to its next token.

    logits -> repetition penalty -> presence and frequency -> bias -> what is forbidden -> temperature -> top-k -> top-p -> draw

The order is that of transformers' and vLLM's processors. Each request has a sampler of its own, with its own random generator
and its own counts, so what a row draws depends on its logits and its seed alone and never on its neighbours. `choose` only
enqueues device work and `accept` records what was taken, in two calls: a speculative step chooses several tokens for a row
but accepts only some of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kaminari_core.errors import RequestError
from kaminari_core.flow import Sampling

COLDEST = 1e-5
"""Temperatures below this are greedy: the draw could no longer differ, only overflow."""
SEEDS = range(-(2**63), 2**64)
"""What torch.Generator takes."""
MOST_LOGPROBS = 20


class RowSampler:
    """Chooses the tokens of one request."""

    @torch.inference_mode()
    def __init__(self, sampling: Sampling, prompt_tokens: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self._sampling = sampling
        self._draws = sampling.temperature >= COLDEST
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[torch.tensor(sorted(set(prompt_tokens)), dtype=torch.int64, device=device)] = True
        self._counts: Tensor | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = torch.zeros(vocabulary, device=device)
        self._bias: tuple[Tensor, Tensor] | None = None
        if sampling.logit_bias:
            tokens, values = zip(*sampling.logit_bias.items(), strict=True)
            self._bias = torch.tensor(tokens, device=device), torch.tensor(values, dtype=torch.float32, device=device)

    @property
    def is_greedy(self) -> bool:
        """Whether `choose` is the argmax of the unmodified logits, so that many rows can be chosen in one call."""
        return not self._draws and self._seen is None and self._counts is None and self._bias is None

    @torch.inference_mode()
    def choose(self, logits: Tensor, forbidden: Tensor | None = None) -> Tensor:
        """The next token, int64 (), from logits (vocabulary,) of any float dtype, without waiting for the device.

        `forbidden`, bool (vocabulary,), is True at tokens that must not come; the others share their chances. The logits are
        left as they are. Calling it again draws anew.
        """
        scores = self.penalize(logits)
        if forbidden is not None:
            scores = scores.masked_fill(forbidden, -torch.inf)
        if not self._draws:
            return scores.argmax()
        return self._draw(scores)

    @torch.inference_mode()
    def accept(self, token: int) -> None:
        """Record a token that became part of the reply, so that penalties count it."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    @torch.inference_mode()
    def penalize(self, logits: Tensor) -> Tensor:
        """Apply penalties and bias; returns float32 (vocabulary,).

        Repetition: a seen token's score is divided by the penalty if positive, else multiplied, as transformers does (after
        Keskar et al. 2019, section 4.1). Presence and frequency: `score - count * frequency - (count > 0) * presence`, the
        formula of the OpenAI API.
        """
        scores = logits.float()
        if self._seen is not None:
            penalty = self._sampling.repetition_penalty
            scores = torch.where(self._seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        if self._counts is not None:
            scores = scores - self._counts * self._sampling.frequency_penalty
            scores = scores - (self._counts > 0) * self._sampling.presence_penalty
        if self._bias is not None:
            scores = scores.index_add(0, *self._bias)
        return scores

    def _draw(self, scores: Tensor) -> Tensor:
        # Relative to the largest, so that no temperature can make all of them infinite.
        scores = (scores - scores.max()) / self._sampling.temperature
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if not 0 < top_k < len(scores) and top_p >= 1:
            return self._pick(scores.softmax(dim=-1))
        if 0 < top_k < len(scores):
            kept, tokens = scores.topk(top_k)
        else:
            kept, tokens = scores.sort(descending=True, stable=True)
        chances = kept.softmax(dim=-1)
        if top_p < 1:
            # The smallest set that reaches top_p: a token stays if those before it do not reach it yet.
            chances = chances.masked_fill(chances.cumsum(dim=-1) - chances >= top_p, 0.0)
        return tokens.take(self._pick(chances))  # indexing with a tensor would read it on the host

    def _pick(self, chances: Tensor) -> Tensor:
        """Draw an index with probability proportional to `chances`.

        The largest of `chance / noise`, noise exponential, is such a draw. Unlike torch.multinomial it needs no host check.
        """
        noise = torch.empty_like(chances).exponential_(generator=self._generator)
        return (chances / noise.clamp_min(torch.finfo(noise.dtype).tiny)).argmax()


@torch.inference_mode()
def logprobs(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token and the `count` most likely tokens with theirs, most likely first.

    Natural logarithms under the unmodified logits (vocabulary,), computed in float32. Waits for the device.
    """
    scores = logits.float().log_softmax(dim=-1)
    top = scores.topk(min(count, len(scores)))
    values = torch.cat([scores[token : token + 1], top.values]).tolist()
    return values[0], list(zip(top.indices.tolist(), values[1:], strict=True))


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens, int64 (...), under unmodified logits (..., vocabulary): float32 (...), on the device.

    The natural logarithm of softmax at one place, which needs no other place: the logit less the logsumexp of all. A token below
    0 is none, and what it gets means nothing.
    """
    own = logits.gather(-1, tokens.clamp(min=0)[..., None])[..., 0].float()
    return (own - logits.float().logsumexp(dim=-1)).clamp(max=0)


def validate(sampling: Sampling, vocabulary: int) -> None:
    """Refuse settings that no row may run with. Raises RequestError with the field's name as its param."""
    _check_range("temperature", sampling.temperature, 0, 100)
    _check_range("top_p", sampling.top_p, 0, 1, open_below=True)
    _check_range("top_k", sampling.top_k, 0, 2**63 - 1)
    # Bounds of these two keep scores finite: infinity minus infinity is not a number, and no token would be drawn rightly.
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.01, 100)
    _check_range("presence_penalty", sampling.presence_penalty, -2, 2)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2, 2)
    if sampling.logprobs is not None:
        _check_range("logprobs", sampling.logprobs, 0, MOST_LOGPROBS)
    # Anything else than an int would be searched for in the range, number by number.
    if sampling.seed is not None and not (type(sampling.seed) is int and sampling.seed in SEEDS):
        raise RequestError(f"seed is {sampling.seed}, but must be a whole number of 64 bits", param="seed")
    for token, value in sampling.logit_bias.items():
        if type(token) is not int or token not in range(vocabulary):
            raise RequestError(
                f"logit_bias names the token {token!r}, but tokens are whole numbers from 0 to {vocabulary - 1}",
                param="logit_bias",
            )
        _check_range("logit_bias", value, -100, 100)


def _check_range(name: str, value: float, least: float, most: float, *, open_below: bool = False) -> None:
    if least <= value <= most and not (open_below and value == least):
        return
    below = "above" if open_below else "at least"
    raise RequestError(f"{name} is {value}, but must be {below} {least:g} and at most {most:g}", param=name)
