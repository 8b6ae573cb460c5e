"""`kaminari doctor`: what this machine computes with, and why not with something quicker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from kaminari_core.options import option
from kaminari_core.progress import terminal_progress


@click.command()
@option("--compile/--no-compile", default=False, help="Compile the CPU kernels now, if they are not in the cache yet.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(compile: bool, as_json: bool) -> None:
    """Show what kaminari finds on this machine: versions, processor, card, compiler, kernels, caches, and what serves what.

    The exit code is 0 whether or not anything is missing: everything has something slower to fall back on.
    """
    from kaminari_core.kernels.diagnosis import diagnose

    with terminal_progress() as progress:
        found = diagnose(compile, progress)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for title, facts in found.items():
        click.echo(f"{title}:")
        _print(facts)


def _print(facts: Mapping[str, Any]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
        click.echo(f"  {name.replace('_', ' '):<{width}}  {shown}")
