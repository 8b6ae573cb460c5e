"""What one item of the conformance kit found: passed, failed or not applicable, with the numbers and the likely cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kaminari_core.errors import KaminariError

Status = Literal["pass", "fail", "n/a"]
Number = int | float | str


class ConformanceError(KaminariError, AssertionError):
    """A model that does not keep what the engine relies on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One item's result. `detail` is one line with its number, `suspects` say which known bugs a failure looks like."""

    status: Status
    detail: str
    numbers: Mapping[str, Number]
    suspects: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The detail, and below it what a failure looks like."""
        return "\n".join([self.detail, *(f"looks like: {suspect}" for suspect in self.suspects)])


def passed(detail: str, **numbers: Number) -> Outcome:
    """What the item asks for holds."""
    return Outcome("pass", detail, numbers)


def failed(detail: str, suspects: Sequence[str] = (), **numbers: Number) -> Outcome:
    """It does not."""
    return Outcome("fail", detail, numbers, tuple(suspects))


def not_applicable(reason: str) -> Outcome:
    """There is nothing to check here."""
    return Outcome("n/a", reason, {})


def judged(holds: bool, detail: str, suspects: Sequence[str] = (), **numbers: Number) -> Outcome:
    """Passed or failed, with the same line for both."""
    return passed(detail, **numbers) if holds else failed(detail, suspects, **numbers)
