"""Letting an engine read the samples of a set, several at a time, with every one of them accounted for."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

from kaminari_core.engine import Engine
from kaminari_core.errors import KaminariError
from kaminari_core.evaluation.sample import Sample
from kaminari_core.flow import Event, Failed, Finished, ImagePart, Message, Request, Result, Sampling, TextPart
from kaminari_core.protocols import Progress

AHEAD = 4
"""Pages that are prepared beyond those that are decoded, so that no slot waits and no set has to fit into memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a sample: a result, or the error that kept it from being read."""

    sample: Sample
    result: Result | None
    error: KaminariError | None = None

    @property
    def text(self) -> str:
        """What was read, "" for a page that failed."""
        return self.result.text if self.result else ""

    @property
    def status(self) -> str:
        """`read`, `blank` (nothing was read) or `failed`."""
        return "failed" if self.result is None else "read" if self.text.strip() else "blank"


def read_samples(
    engine: Engine, samples: Sequence[Sample], phrase: str, progress: Progress, sampling: Sampling | None = None
) -> list[Outcome]:
    """Read samples greedily, each with its own question or else with the task's phrase; outcomes are in the samples' order.

    A page that fails is an outcome and keeps the others from nothing.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    window = min(engine.config.slots + AHEAD, engine.config.queue)
    waiting: dict[str, int] = {}
    outcomes: dict[int, Outcome] = {}
    upcoming = iter(enumerate(samples))
    while len(outcomes) < len(samples):
        while len(waiting) < window and (following := next(upcoming, None)):
            number, sample = following
            request = _request(sample, phrase, sampling or Sampling())
            waiting[request.id] = number
            engine.submit(request, events.put)
        event = events.get()
        if isinstance(event, Finished | Failed):
            number = waiting.pop(event.request_id)
            result, error = (event.result, None) if isinstance(event, Finished) else (None, event.error)
            outcomes[number] = Outcome(samples[number], result, error)
            progress("read", len(outcomes), len(samples))
    return [outcomes[number] for number in range(len(samples))]


def _request(sample: Sample, phrase: str, sampling: Sampling) -> Request:
    picture = ImagePart(sample.file.read_bytes(), sample.name)
    return Request((Message("user", (picture, TextPart(sample.question or phrase))),), sampling=sampling)
