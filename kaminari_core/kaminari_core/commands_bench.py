"""`kaminari bench`: how fast an engine is, and by what ratio against the stock implementation, in one run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.commands_ladder import bench_ladder
from kaminari_core.commands_run import read_picture
from kaminari_core.commands_url import bench_url
from kaminari_core.errors import UsageError
from kaminari_core.options import engine_config, engine_options, option, optional_model_options
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry

if TYPE_CHECKING:
    from kaminari_core.bench import Measured
    from kaminari_core.config import EngineConfig
    from kaminari_core.engine import Engine
    from kaminari_core.flow import ImagePart
    from kaminari_core.specs import ModelSpec

PROMPT_TOKENS, NEW_TOKENS = 128, 64
"""The workload unless one is given."""


@click.command()
@optional_model_options
@option("--against", type=click.Choice(["hf"]), help="Also measure the stock transformers class, dynamic and static.")
@option("--rows", default="1", show_default=True, metavar="N,N,...", help="How many requests to serve together.")
@option(
    "--ladder", is_flag=True, help="Measure every step from the stock implementation to the fastest setting instead."
)
@option("--rungs", metavar="NAME,NAME,...", help="Of the ladder, these rungs only.")
@option(
    "--packed",
    multiple=True,
    metavar="NAME=DIR",
    help="A packed form of the checkpoint for the ladder's quantized rungs.",
)
@option(
    "--seconds",
    default=900.0,
    show_default=True,
    help="Time budget of the ladder; it makes fewer rounds rather than exceed it.",
)
@option(
    "--memory/--no-memory",
    default=True,
    show_default=True,
    help="Measure the ladder's peak memory, in processes of its own.",
)
@option(
    "--prompt-tokens", type=int, show_default="128; 480 for the ladder", help="Tokens of the prompt, pictures included."
)
@option("--new-tokens", type=int, show_default="64; 32 for the ladder", help="Tokens to decode.")
@option("--rounds", default=3, show_default=True, help="Rounds that count; the contenders take turns in each.")
@option("--prompt", metavar="TEXT", help="The prompt itself, instead of filler of --prompt-tokens.")
@option("--image", "images", multiple=True, metavar="FILE", help="A picture in the prompt.")
@option(
    "--url", metavar="URL", help="Measure an OpenAI-compatible server instead; --rows is then the number of clients."
)
@option("--api-key", metavar="KEY", help="The key of that server.")
@option("--model-name", metavar="NAME", help="The model to ask of that server; the first that it lists unless given.")
@option(
    "--body", metavar="JSON", help="Fields to add to every request to that server, such as '{\"ignore_eos\": true}'."
)
@option("--out", metavar="FILE", help="Write the figures as JSON, with machine, versions and settings.")
@engine_options({"slots": None}, shown={"slots": "the most rows asked for"})
@click.pass_obj
def bench(
    registry: Registry,
    /,
    model: str | None,
    checkpoint: str | None,
    against: str | None,
    rows: str,
    ladder: bool,
    rungs: str | None,
    packed: Sequence[str],
    seconds: float,
    memory: bool,
    prompt_tokens: int | None,
    new_tokens: int | None,
    rounds: int,
    prompt: str | None,
    images: Sequence[str],
    url: str | None,
    api_key: str | None,
    model_name: str | None,
    body: str | None,
    out: str | None,
    **values: Any,
) -> None:
    """Measure decoding speed and time to first token.

    With `--ladder`, every way of decoding that is built in, on one table: what each step gains over the stock
    implementation, what share of the memory bandwidth it reaches, how far its logits are from bfloat16.

    With `--url`, what several clients of a server see together: tokens per second, time to first token and between tokens.

    Contenders take turns, one warm-up round is not counted, medians are compared: read the ratios, which hold within one
    run, rather than the absolute figures.
    """
    if url:
        bench_url(
            url, _counts(rows), key=api_key, model=model_name, prompt=prompt, prompt_tokens=prompt_tokens,
            new_tokens=new_tokens, extra=body, rounds=rounds, out=out,
        )  # fmt: skip
        return
    if model is None:
        raise UsageError("give --model, or --url to measure a server")
    if ladder:
        bench_ladder(
            registry, model, checkpoint, engine_config(**values), rungs=rungs, packed=packed, prompt_tokens=prompt_tokens,
            new_tokens=new_tokens, rounds=rounds, seconds=seconds, memory=memory, out=out,
        )  # fmt: skip
        return
    counts = _counts(rows)
    config = engine_config(**{**values, "slots": values["slots"] or max(counts)})
    if max(counts) > config.slots:
        raise UsageError(f"--rows asks for {max(counts)} requests together, but there are {config.slots} slots")
    spec, folder = resolve(registry, model, checkpoint)
    pictures = [read_picture(path) for path in images]
    _compare(
        registry, spec, folder, config, counts, pictures, prompt, against=against, rounds=rounds, out=out,
        prompt_tokens=prompt_tokens or PROMPT_TOKENS, new_tokens=new_tokens or NEW_TOKENS,
    )  # fmt: skip


def _compare(
    registry: Registry,
    spec: ModelSpec,
    folder: Path,
    config: EngineConfig,
    counts: Sequence[int],
    pictures: Sequence[ImagePart],
    prompt: str | None,
    *,
    against: str | None,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    out: str | None,
) -> None:
    """Measure an engine, without drafts too where it drafts, and the stock implementation where asked for."""
    from kaminari_core.bench import interleave, measure_engine, measure_reference, prompt_of, report, table
    from kaminari_core.launch import open_engine

    with terminal_progress() as progress, contextlib.ExitStack() as opened:

        def engine_of(config: EngineConfig) -> Engine:
            return opened.enter_context(
                contextlib.closing(open_engine(registry, spec.name, str(folder), config, progress))
            )

        # With drafts, the same engine without them is measured in the same rounds.
        plain = engine_of(dataclasses.replace(config, draft="none"))
        engines = [plain] if config.draft == "none" else [plain, engine_of(config)]
        request = prompt_of(plain, prompt_tokens, pictures, prompt)
        contenders: list[Callable[[], Measured]] = []
        if against:
            reference = spec.load_reference()(folder, plain.model.device, plain.model.dtype)
            stock = functools.partial(measure_reference, plain, reference, request, new_tokens)
            contenders = [functools.partial(stock, "dynamic"), functools.partial(stock, "static")]
        for count in counts:
            contenders += [functools.partial(measure_engine, engine, request, new_tokens, count) for engine in engines]
        medians = interleave(contenders, rounds, progress)
        click.echo(table(medians))
        if out:
            settings = {
                "prompt_tokens": plain.model.prepare(request).length,
                "new_tokens": new_tokens,
                "rounds": rounds,
                "images": len(pictures),
            }
            Path(out).write_text(json.dumps(report(engines[-1], settings, medians), indent=1) + "\n")


def _counts(rows: str) -> list[int]:
    try:
        counts = [int(count) for count in rows.split(",")]
    except ValueError as error:
        raise UsageError(f"--rows is {rows!r}; give numbers with commas between them, such as 1,2,4") from error
    if min(counts) < 1:
        raise UsageError(f"--rows is {rows!r}, but each number must be at least 1")
    return counts
