"""`kaminari bench`: how fast an engine is, and by what ratio against the stock implementation, in one run."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.commands_run import read_picture
from kaminari_core.errors import UsageError
from kaminari_core.options import engine_config, engine_options, model_options, option
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry

if TYPE_CHECKING:
    from kaminari_core.bench import Measured


@click.command()
@model_options
@option("--against", type=click.Choice(["hf"]), help="Also measure the stock transformers class, dynamic and static.")
@option("--rows", default="1", show_default=True, metavar="N,N,...", help="How many requests to serve together.")
@option("--prompt-tokens", default=128, show_default=True, help="Tokens of the prompt, pictures included.")
@option("--new-tokens", default=64, show_default=True, help="Tokens to decode.")
@option("--rounds", default=3, show_default=True, help="Rounds that count; the contenders take turns in each.")
@option("--image", "images", multiple=True, metavar="FILE", help="A picture in the prompt.")
@option("--out", metavar="FILE", help="Write the figures as JSON, with machine, versions and settings.")
@engine_options({"slots": None}, shown={"slots": "the most rows asked for"})
@click.pass_obj
def bench(
    registry: Registry,
    /,
    model: str,
    checkpoint: str | None,
    against: str | None,
    rows: str,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    images: Sequence[str],
    out: str | None,
    **values: Any,
) -> None:
    """Measure decoding speed and time to first token.

    Contenders take turns, one warm-up round is not counted, medians are compared: read the ratios, which hold within one
    run, rather than the absolute figures.
    """
    from kaminari_core.bench import interleave, measure_engine, measure_reference, prompt_of, report, table
    from kaminari_core.launch import open_engine

    counts = _counts(rows)
    config = engine_config(**{**values, "slots": values["slots"] or max(counts)})
    if max(counts) > config.slots:
        raise UsageError(f"--rows asks for {max(counts)} requests together, but there are {config.slots} slots")
    spec, folder = resolve(registry, model, checkpoint)
    pictures = [read_picture(path) for path in images]
    with (
        terminal_progress() as progress,
        contextlib.closing(open_engine(registry, spec.name, str(folder), config, progress)) as engine,
    ):
        request = prompt_of(engine, prompt_tokens, pictures)
        contenders: list[Callable[[], Measured]] = []
        if against:
            reference = spec.load_reference()(folder, engine.model.device, engine.model.dtype)
            stock = functools.partial(measure_reference, engine, reference, request, new_tokens)
            contenders = [functools.partial(stock, "dynamic"), functools.partial(stock, "static")]
        contenders += [functools.partial(measure_engine, engine, request, new_tokens, count) for count in counts]
        medians = interleave(contenders, rounds, progress)
        click.echo(table(medians))
        if out:
            settings = {
                "prompt_tokens": engine.model.prepare(request).length,
                "new_tokens": new_tokens,
                "rounds": rounds,
                "images": len(pictures),
            }
            Path(out).write_text(json.dumps(report(engine, settings, medians), indent=1) + "\n")


def _counts(rows: str) -> list[int]:
    try:
        counts = [int(count) for count in rows.split(",")]
    except ValueError as error:
        raise UsageError(f"--rows is {rows!r}; give numbers with commas between them, such as 1,2,4") from error
    if min(counts) < 1:
        raise UsageError(f"--rows is {rows!r}, but each number must be at least 1")
    return counts
