"""What `kaminari bench --ladder` does: choose rungs, measure them in turns, print the table, write the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kaminari_core.errors import UsageError
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry

if TYPE_CHECKING:
    from kaminari_core.config import EngineConfig

PROMPT_TOKENS, NEW_TOKENS = 480, 32
"""The workload unless one is given: together a context of 512."""


def bench_ladder(
    registry: Registry,
    model: str,
    checkpoint: str | None,
    config: EngineConfig,
    *,
    rungs: str | None,
    packed: Sequence[str],
    prompt_tokens: int | None,
    new_tokens: int | None,
    rounds: int,
    seconds: float,
    memory: bool,
    out: str | None,
) -> None:
    """Measure the ladder and show it. Raises KaminariError."""
    from kaminari_core.ladder.climb import Plan, climb, table
    from kaminari_core.ladder.rungs import chosen

    plan = Plan(chosen(rungs), prompt_tokens or PROMPT_TOKENS, new_tokens or NEW_TOKENS, rounds, seconds, memory)
    with terminal_progress() as progress:
        report = climb(registry, model, checkpoint, config, _folders(packed), plan, progress)
    click.echo(table(report))
    click.echo(f"\nmemory is read at {report['read_bandwidth'] / 1e9:.1f} GB/s")
    if out:
        Path(out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _folders(packed: Sequence[str]) -> dict[str, Path]:
    """The packed directories by name."""
    found = {}
    for each in packed:
        name, equals, folder = each.partition("=")
        if not equals:
            raise UsageError(f"--packed is {each!r}; give NAME=DIR, such as int4=DIR")
        if not Path(folder).is_dir():
            raise UsageError(f"--packed {name} names {folder}, which is no directory")
        found[name] = Path(folder)
    return found
