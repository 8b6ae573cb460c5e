"""One set, many configurations: how accuracy, speed and memory change along the axes of a grid.

    quantizer=none,int8,int4 tokens=64,128,256 -> six configurations, each in a process of its own -> one row each

An axis is a field of `EngineConfig` with dashes, `tokens` being short for `visual-tokens`. Each configuration is compared, page
by page, with the one that differs in the first axis alone and has its first value there. A configuration that cannot run is a
row that says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

from kaminari_core.config import EngineConfig
from kaminari_core.errors import KaminariError, UsageError
from kaminari_core.evaluation.interval import paired
from kaminari_core.evaluation.run import Evaluation

SHORT: Final[Mapping[str, str]] = MappingProxyType({"tokens": "visual-tokens"})
SWITCHES: Final[Mapping[str, bool]] = MappingProxyType({"on": True, "off": False})


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration by its axes, with what came of it: an evaluation, or why there is none."""

    values: Mapping[str, str]
    evaluation: Evaluation | None
    error: str | None = None


def parse_axes(words: Sequence[str]) -> dict[str, list[str]]:
    """`name=value,value` words as axes. Raises UsageError for what is no axis, is given twice, or has a value twice."""
    names = [field.name.replace("_", "-") for field in fields(EngineConfig)]
    axes: dict[str, list[str]] = {}
    for word in words:
        name, _, values = word.partition("=")
        if SHORT.get(name, name) not in names:
            known = ", ".join([*SHORT, *names])
            raise UsageError(f"{word!r} is no axis of a sweep; it takes NAME=VALUE,VALUE, NAME one of: {known}")
        axes[name] = [value.strip() for value in values.split(",")]
        if not values or len(set(axes[name])) < len(axes[name]):
            raise UsageError(f"the axis {word!r} needs values, each of them once")
    if len(axes) < len(words):
        raise UsageError(f"an axis is given twice: {' '.join(words)}")
    return axes


def configurations(base: EngineConfig, axes: Mapping[str, Sequence[str]]) -> list[tuple[dict[str, str], EngineConfig]]:
    """All combinations of the axes' values, the last axis changing fastest. Raises UsageError for a value that is none."""
    found = []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        changes = {SHORT.get(name, name).replace("-", "_"): value for name, value in values.items()}
        found.append((values, replace(base, **{name: _parsed(name, value) for name, value in changes.items()})))
    return found


def sweep(
    grid: Sequence[tuple[dict[str, str], EngineConfig]],
    evaluate: Callable[[EngineConfig], Evaluation],
    progress: Callable[[str, int, int], None],
) -> list[Row]:
    """Evaluate each configuration of a grid. Raises UsageError when none of them can run."""
    rows = []
    for done, (values, config) in enumerate(grid):
        progress("sweep", done, len(grid))
        try:
            rows.append(Row(values, evaluate(config)))
        except KaminariError as error:
            rows.append(Row(values, None, str(error)))
    progress("sweep", len(grid), len(grid))
    if all(row.evaluation is None for row in rows):
        raise UsageError(f"no configuration of the sweep can run; the first: {rows[0].error}")
    return rows


def baseline(row: Row, rows: Sequence[Row]) -> Row:
    """The row that another one is compared with: of the same values but for the first axis, which has its first value."""
    axis = next(iter(row.values))
    values = {**row.values, axis: rows[0].values[axis]}
    return next(other for other in rows if other.values == values)


def change(row: Row, rows: Sequence[Row]) -> tuple[float, tuple[float, float]] | None:
    """How much the character error rate differs from the baseline's, with the interval of that difference.

    None for the baseline itself, where either did not run, and where the set has fewer than two pages with a text.
    """
    other = baseline(row, rows)
    if row is other or row.evaluation is None or other.evaluation is None:
        return None
    ours, lengths = page_counts(row.evaluation)
    theirs, _ = page_counts(other.evaluation)
    interval = paired(ours, theirs, lengths)
    return None if interval is None else ((sum(ours) - sum(theirs)) / sum(lengths), interval)


def page_counts(evaluation: Evaluation) -> tuple[list[int], list[int]]:
    """Character edits and characters of each page with a text."""
    texts = [read.score.text for read in evaluation.pages if read.score.text is not None]
    return [text.character_edits for text in texts], [text.characters for text in texts]


def _parsed(name: str, value: str) -> Any:
    default = getattr(EngineConfig(), name)
    try:
        return SWITCHES[value] if isinstance(default, bool) else type(default)(value)
    except (KeyError, ValueError):
        kind = "on or off" if isinstance(default, bool) else f"of the kind {type(default).__name__}"
        raise UsageError(f"{name.replace('_', '-')} in the sweep is {value!r}, but must be {kind}") from None
