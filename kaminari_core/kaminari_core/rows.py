"""What a decode step is fed from its rows, and what they take from its logits: token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kaminari_core.errors import EngineError
from kaminari_core.flow import Alternative, Delta, Token
from kaminari_core.live import Live
from kaminari_core.sampling import logprobs, token_logprobs
from kaminari_core.structured.masks import Masks

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


def choose(
    rows: Sequence[Live], logits: Tensor, guesses: Sequence[Sequence[int]], masks: Masks
) -> tuple[list[list[int]], list[Tensor | None]]:
    """The likeliest token at every position, (rows, width), but the sampled one at the first of a row that samples; and for
    each row that is held to a structure where tokens are forbidden, bool (guesses + 1, vocabulary).

    A token is -1 where the logits are not finite: the largest is then not-a-number or infinite. The read at the end is the only
    wait for the device in a step without drafts; the log-probabilities of rows that want them come with it, see `Live.logprobs`.
    """
    with torch.inference_mode():
        forbidden = _forbidden(rows, guesses, masks)
        highest, chosen = logits.max(dim=-1)
        for index, (live, banned) in enumerate(zip(rows, forbidden, strict=True)):
            if not live.sampler.is_greedy:
                chosen[index, 0] = live.sampler.choose(logits[index, 0], None if banned is None else banned[0])
            elif banned is not None:
                width = len(banned)
                chosen[index, :width] = logits[index, :width].masked_fill(banned, -torch.inf).argmax(dim=-1)
        chosen = chosen.masked_fill(~highest.isfinite(), -1)
        wanting = [index for index, live in enumerate(rows) if live.wants_logprobs]
        if not wanting:
            return chosen.tolist(), forbidden
        # Stacked, not indexed with a list: that would be copied to the device, and waited for.
        own = token_logprobs(
            torch.stack([logits[index] for index in wanting]), torch.stack([chosen[index] for index in wanting])
        )
        # In one read, and exactly: doubles hold every token.
        read = torch.cat([chosen.double(), own.double()]).tolist()
    for index, values in zip(wanting, read[len(rows) :], strict=True):
        rows[index].logprobs = values
    return [list(map(int, tokens)) for tokens in read[: len(rows)]], forbidden


def _forbidden(rows: Sequence[Live], guesses: Sequence[Sequence[int]], masks: Masks) -> list[Tensor | None]:
    """Where each row may not go. A row whose grammar fails has its `error` set, and is not looked at again."""
    spans: dict[int, slice] = {}
    used = 0
    for index, (live, guess) in enumerate(zip(rows, guesses, strict=True)):
        if live.constraint is None:
            continue
        try:
            stop = masks.write(live.constraint, guess, used)
        except EngineError as error:
            live.error = error
            continue
        spans[index], used = slice(used, stop), stop
    if not spans:
        return [None] * len(rows)
    everything = masks.forbidden(used)
    return [everything[spans[index]] if index in spans else None for index in range(len(rows))]


def take(
    live: Live, chosen: Sequence[int], logits: Tensor, guess: Sequence[int], forbidden: Tensor | None = None
) -> None:
    """Add this step's tokens to a row's reply: go on behind each guess that was chosen."""
    live.fresh = []
    if live.error is not None:
        return
    text = ""
    taken: list[Token] = []
    for index in range(len(guess) + 1):
        token = chosen[index]
        if token < 0:
            live.error = EngineError(NOT_FINITE)
            break
        if index > 0 and not live.sampler.is_greedy:
            token = int(live.sampler.choose(logits[index], None if forbidden is None else forbidden[index]))
        live.sampler.accept(token)
        last = False
        if live.constraint is not None:
            try:
                live.constraint.accept(token)
            except EngineError as error:
                live.error = error
                break
            last = live.constraint.is_stopped
        live.fresh.append(token)
        known = live.logprobs[index] if live.wants_logprobs and token == chosen[index] else None
        added, tokens = live.reply.take(token, *_report(live, token, logits[index], known), last=last)
        text += added
        taken += tokens
        right = index < len(guess) and token == guess[index]
        live.accepted += right
        if live.reply.ended or not right:
            break
    live.chosen += live.fresh
    if live.fresh:
        live.send(Delta(live.request.id, text, tuple(taken)))


def _report(
    live: Live, token: int, logits: Tensor, known: float | None
) -> tuple[float | None, tuple[Alternative, ...]]:
    """The token's log-probability, if it is not `known`, and the most likely alternatives, where the request asked for them."""
    count = live.request.sampling.logprobs
    if known is not None or (count is None and not live.wants_logprobs):
        return known, ()
    own, top = logprobs(logits, token, count or 0)
    return own, tuple(live.reply.alternative(other, value) for other, value in top)
