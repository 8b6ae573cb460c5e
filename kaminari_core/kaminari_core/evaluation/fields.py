"""Names and values in a reply, and how many of them are right.

A reply's fields are those of the JSON object that it is (or holds, between its first and last brace), else its lines of the
form `name: value`. Nested values are named by their path (`items[0].price`). Names are compared without regard to case, white
space and a colon at the end, values exactly but for white space.

    precision = right / written    recall = right / there    F1 = 2 right / (written + there)

summed over pages before they are divided. A name with a wrong value is one too much and one too few.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(r"\s*(\S[^:\n]{0,80}?)\s*:\s+(\S.*)")


@dataclass(frozen=True, slots=True)
class FieldScore:
    """Counts of one page or, added up, of many; `found` are values of the truth that stand anywhere in the reply."""

    right: int = 0
    written: int = 0
    expected: int = 0
    found: int = 0

    def __add__(self, other: FieldScore) -> FieldScore:
        return FieldScore(
            self.right + other.right,
            self.written + other.written,
            self.expected + other.expected,
            self.found + other.found,
        )

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, 1 when nothing is there and nothing was written."""
        return 2 * self.right / (self.written + self.expected) if self.written + self.expected else 1.0

    @property
    def recalled(self) -> float:
        """Share of the truth's values that stand in the reply, under whatever name."""
        return self.found / max(1, self.expected)


def flatten(value: Any, name: str = "") -> dict[str, str]:
    """JSON values by their paths, as texts; what is null or empty is no field."""
    if isinstance(value, dict):
        parts = [flatten(inner, f"{name}.{key}" if name else str(key)) for key, inner in value.items()]
    elif isinstance(value, list):
        parts = [flatten(inner, f"{name}[{index}]") for index, inner in enumerate(value)]
    else:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return {name: text} if text.strip() else {}
    return {path: text for part in parts for path, text in part.items()}


def fields_of(reply: str) -> dict[str, str]:
    """The fields that a reply names, with normalized names and values; of several values of a name, the first."""
    found = _json_fields(reply)
    if found is None:
        matches = [_LINE.fullmatch(line) for line in reply.splitlines()]
        return normalized((match[1], match[2]) for match in matches if match)
    return normalized(found.items())


def normalized(pairs: Any) -> dict[str, str]:
    """Pairs of name and value as they are compared."""
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields.setdefault(_spaced(name).removesuffix(":").casefold(), _spaced(value))
    return fields


def score_fields(reply: str, truth: Mapping[str, str]) -> FieldScore:
    """Compare a reply's fields with those that are there."""
    written, expected = fields_of(reply), normalized(truth.items())
    text = _spaced(reply)
    return FieldScore(
        right=sum(written.get(name) == value for name, value in expected.items()),
        written=len(written),
        expected=len(expected),
        found=sum(value in text for value in expected.values()),
    )


def _json_fields(reply: str) -> dict[str, str] | None:
    start, end = reply.find("{"), reply.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        return flatten(json.loads(reply[start : end + 1]))
    except (ValueError, RecursionError):
        return None


def _spaced(text: str) -> str:
    return " ".join(text.split())
