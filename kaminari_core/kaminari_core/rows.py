"""What a decode step is fed from its rows, and what they take from its logits: token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kaminari_core.errors import EngineError
from kaminari_core.flow import Alternative, Delta, Token
from kaminari_core.live import Live
from kaminari_core.sampling import logprobs

NOT_FINITE = (
    "the model computed no finite numbers for this request (NaN or infinity), so it ended here; others are not affected. If it "
    "happens again, compute in another precision (--dtype float32)"
)


def check_finite(logits: Tensor) -> None:
    """Raise EngineError where logits (vocabulary,) hold NaN or infinity. Minus infinity forbids a token and may stand."""
    if not logits.max().isfinite():
        raise EngineError(NOT_FINITE)


def feed(
    rows: Sequence[Live], guesses: Sequence[Sequence[int]], width: int, spare: int
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, rotary positions and cursors of a step: each row's last token and its guesses, padded to one width."""
    width = width if any(guesses) else 1
    tokens, positions, cursors = [], [], []
    for live, guess in zip(rows, guesses, strict=True):
        idle = width - 1 - len(guess)
        used = range(live.length, live.length + 1 + len(guess))
        tokens.append([live.chosen[-1], *guess, *[0] * idle])
        positions.append([*map(live.rotary, used), *[0] * idle])
        cursors.append([*used, *[spare] * idle])
    return tokens, positions, cursors


def choose(rows: Sequence[Live], logits: Tensor) -> list[list[int]]:
    """The likeliest token at every position, (rows, width), but the sampled one at the first of a row that samples.

    It is -1 where the logits are not finite: the largest is then not-a-number or infinite. The read at the end is the only
    wait for the device in a step without drafts.
    """
    with torch.inference_mode():
        highest, chosen = logits.max(dim=-1)
        for index, live in enumerate(rows):
            if not live.sampler.is_greedy:
                chosen[index, 0] = live.sampler.choose(logits[index, 0])
        chosen = chosen.masked_fill(~highest.isfinite(), -1)
    tokens: list[list[int]] = chosen.tolist()
    return tokens


def take(live: Live, chosen: Sequence[int], logits: Tensor, guess: Sequence[int]) -> None:
    """Add this step's tokens to a row's reply: go on behind each guess that was chosen."""
    live.fresh = []
    text = ""
    taken: list[Token] = []
    for index in range(len(guess) + 1):
        token = chosen[index]
        if token < 0:
            live.error = EngineError(NOT_FINITE)
            break
        if index > 0 and not live.sampler.is_greedy:
            token = int(live.sampler.choose(logits[index]))
        live.sampler.accept(token)
        live.fresh.append(token)
        added, tokens = live.reply.take(token, *_report(live, token, logits[index]))
        text += added
        taken += tokens
        right = index < len(guess) and token == guess[index]
        live.accepted += right
        if live.reply.ended or not right:
            break
    live.chosen += live.fresh
    if live.fresh:
        live.send(Delta(live.request.id, text, tuple(taken)))


def _report(live: Live, token: int, logits: Tensor) -> tuple[float | None, tuple[Alternative, ...]]:
    """The chosen token's log-probability and the most likely alternatives, where the request asked for them."""
    count = live.request.sampling.logprobs
    if count is None:
        return None, ()
    own, top = logprobs(logits, token, count)
    return own, tuple(live.reply.alternative(other, value) for other, value in top)
