"""`kaminari check`: whether a model plugin keeps what the engine relies on, one line per item with its number."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence

import click

from kaminari_core.options import model_options, option
from kaminari_core.registry import Registry


@click.command()
@model_options
@option("--device", default="auto", show_default=True, help="Where to check: `auto`, `cpu`, `cuda` or `cuda:N`.")
@option("--steps", type=click.IntRange(min=8), default=24, show_default=True, help="Greedy tokens of each comparison.")
@option(
    "--tolerance", default=1e-3, show_default=True, help="The largest difference of float32 logits that is rounding."
)
@option(
    "--compile/--no-compile", default=True, show_default=True, help="Check the compiled step too, the slowest item."
)
@option("--only", multiple=True, metavar="ITEM", help="Check this item alone; may be given several times.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def check(
    registry: Registry,
    /,
    model: str,
    checkpoint: str | None,
    device: str,
    steps: int,
    tolerance: float,
    compile: bool,
    only: Sequence[str],
    as_json: bool,
) -> None:
    """Check a model plugin against what the engine relies on.

    One line per item: pass, fail or n/a (nothing to check here, and why). A failure says which known bug it looks like. The
    exit code is 0 when nothing failed, else 1.
    """
    from kaminari_core.check.cases import cases, run_all
    from kaminari_core.check.subject import Settings

    # The reason of a failure is told below; what the engine logs about it would come twice.
    logging.basicConfig(level="CRITICAL", stream=sys.stderr)
    settings = Settings(device, steps, tolerance, compile)
    found = cases(model, checkpoint, settings=settings, registry=registry, only=only)
    rows = []
    for case, outcome, seconds in run_all(found):
        rows.append({
            "item": case.name, "status": outcome.status, "detail": outcome.detail, "numbers": dict(outcome.numbers),
            "suspects": list(outcome.suspects), "seconds": round(seconds, 2),
        })  # fmt: skip
        if not as_json:
            click.echo(f"{outcome.status:<5} {case.name:<16} " + outcome.text.replace("\n", "\n" + " " * 23))
    counts = Counter(str(row["status"]) for row in rows)
    if as_json:
        subject = found[0].subject
        facts = {"model": subject.spec.name, "checkpoint": str(subject.checkpoint), "items": rows, **counts}
        click.echo(json.dumps(facts, indent=1))
    else:
        click.echo(f"{counts['pass']} passed, {counts['fail']} failed, {counts['n/a']} not applicable")
    if counts["fail"]:
        raise click.exceptions.Exit(1)
