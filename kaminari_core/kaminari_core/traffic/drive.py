"""Lets several clients ask at once, each as soon as it was answered, and sums up what they saw."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from kaminari_core.protocols import Progress
from kaminari_core.traffic.clients import Answer, Client


@dataclass(frozen=True, slots=True)
class Level:
    """So many clients at once: tokens per second of all, and percentiles in seconds over their answers."""

    clients: int
    requests: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    between_p50: float | None
    between_p99: float | None
    prompt_tokens: int | None


def drive(client: Client, clients: int, requests: int) -> Level:
    """Make `requests` requests in all from `clients` threads. Raises the first error of a client."""
    numbers = itertools.count()
    started = time.monotonic()

    def one(count: int) -> list[Answer]:
        return [client.ask(next(numbers)) for _ in range(count)]

    shares = [requests // clients + (index < requests % clients) for index in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for found in pool.map(one, shares) for answer in found]
    return summary(answers, clients, max(answer.ended for answer in answers) - started)


def summary(answers: Sequence[Answer], clients: int, seconds: float) -> Level:
    """The figures of some answers that took so many seconds together."""
    first = [answer.times[0] - answer.asked for answer in answers]
    between = [later - earlier for answer in answers for earlier, later in itertools.pairwise(answer.times)]
    return Level(
        clients=clients,
        requests=len(answers),
        tokens_per_s=sum(answer.tokens for answer in answers) / seconds,
        ttft_p50=statistics.median(first),
        ttft_p99=percentile(first, 0.99),
        between_p50=statistics.median(between) if between else None,
        between_p99=percentile(between, 0.99) if between else None,
        prompt_tokens=answers[0].prompt_tokens,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def levels(client: Client, counts: Sequence[int], requests: int, rounds: int, progress: Progress) -> list[Level]:
    """Each number of clients in turns, round after round, `requests` per client; of the rounds, the one of median speed.

    One request before, which is not counted, warms the other side up.
    """
    client.ask(0)
    taken: dict[int, list[Level]] = {count: [] for count in counts}
    total = rounds * len(counts)
    for done, (_, count) in enumerate(itertools.product(range(rounds), counts)):
        progress("measure", done, total)
        taken[count].append(drive(client, count, count * requests))
    progress("measure", total, total)
    return [sorted(found, key=lambda level: level.tokens_per_s)[len(found) // 2] for found in taken.values()]


def table(found: Sequence[Level]) -> str:
    """The levels as a Markdown table."""
    lines = [
        "| clients | requests | tokens/s | TTFT p50 ms | TTFT p99 ms | between tokens p50 ms | p99 ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for level in found:
        between = ["" if each is None else f"{each * 1000:.1f}" for each in (level.between_p50, level.between_p99)]
        lines.append(
            f"| {level.clients} | {level.requests} | {level.tokens_per_s:.1f} | {level.ttft_p50 * 1000:.0f} "
            f"| {level.ttft_p99 * 1000:.0f} | {between[0]} | {between[1]} |"
        )
    return "\n".join(lines)


def report(found: Sequence[Level]) -> list[dict[str, Any]]:
    """The levels as plain values."""
    return [asdict(level) for level in found]
