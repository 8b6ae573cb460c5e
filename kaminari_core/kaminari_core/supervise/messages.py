"""What parent and child send each other: frozen values, pickled, one pipe each way."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kaminari_core.config import EngineConfig
from kaminari_core.errors import KaminariError
from kaminari_core.flow import Event, Request, Sampling
from kaminari_core.protocols import ModelShape
from kaminari_core.serving import Health
from kaminari_core.stats import Stats

Stage = Literal["held", "sent", "preparing", "prepared", "started"]
"""Where a request is: still here, in the child's pipe, in a prepare worker, waiting for a slot, in a slot."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a child needs to open its engine. `plugins` are the entry points, by name and target, of the parent's registry."""

    plugins: tuple[tuple[str, str], ...]
    model: str
    checkpoint: str | None
    config: EngineConfig
    name: str | None
    warm_up: bool
    threads: int
    log_level: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Serve a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Have a decode step run; answered by `Answer` of the same number."""

    number: int
    timeout: float


@dataclass(frozen=True, slots=True)
class Count:
    """Preview a request; answered by `Answer` of the same number, with a `Preview`."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """Loading goes on."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is open. These are the facts that front ends ask for."""

    name: str
    config: EngineConfig
    tasks: Mapping[str, str]
    shape: ModelShape
    sampling_defaults: Sampling


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The engine cannot be opened."""

    error: KaminariError


@dataclass(frozen=True, slots=True)
class Report:
    """What happened since the last one, one message per step: stages first, then events. Being sent is a sign of life."""

    stages: tuple[tuple[str, Stage], ...]
    events: tuple[Event, ...]
    facts: tuple[Stats, Health] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question, which is the error if there is one."""

    number: int
    value: Any = None
    error: KaminariError | None = None


@dataclass(frozen=True, slots=True)
class Logged:
    """A log record, to be handled as if it had been logged in the parent."""

    record: logging.LogRecord
