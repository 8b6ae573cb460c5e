"""`kaminari read`: files, folders and patterns of pages, read by an engine that is kept busy, one result a page."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, get_args

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.commands_run import needed_length, read_template
from kaminari_core.documents.folder import Format, open_folder
from kaminari_core.documents.selection import PageSelection
from kaminari_core.documents.sources import Found, find_sources
from kaminari_core.errors import KaminariError, RequestError, UnknownNameError, UsageError
from kaminari_core.options import engine_config, engine_options, model_options, option
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry, unknown_name
from kaminari_core.specs import ModelSpec
from kaminari_core.structured.command_line import read_structure, structure_options
from kaminari_core.tasks import fill

if TYPE_CHECKING:
    from tqdm import tqdm

    from kaminari_core.config import EngineConfig
    from kaminari_core.documents.job import ReadJob
    from kaminari_core.documents.pages import Question
    from kaminari_core.documents.records import Record
    from kaminari_core.engine import Engine

COMPILE_FROM = 64
"""Pages from which on compiling the decode step pays."""
FINGERPRINT_BYTES = 2**20
"""How much of both ends of a weights file tells it from another."""
RESULT_SETTINGS = ("visual_tokens", "sizing", "max_tokens", "dtype", "quantizer", "max_image_pixels")
"""Settings of the engine that the text of a page depends on."""


@click.command()
@model_options
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@option(
    "--out", type=click.Path(file_okay=False), metavar="DIR", help="Write a file for each page here, not to stdout."
)
@option(
    "--format",
    type=click.Choice(get_args(Format)),
    default="text",
    show_default=True,
    help="text and markdown are the model's words as they are; json and jsonl have everything that is known of a page.",
)
@option("--task", default="ocr", show_default=True, help="What is done with each page: a task of the model.")
@option(
    "--template",
    metavar="JSON|FILE",
    help="What a task such as extract is to read: a JSON object of empty strings, or a file of it.",
)
@structure_options
@option("--pages", metavar="RANGES", help="Pages of each document, such as 1-3,7 or 4-.  [default: all]")
@option(
    "--dpi", type=click.FloatRange(10, 2400), default=200, show_default=True, help="How finely PDF pages are drawn."
)
@option("--resume", is_flag=True, help="Go on with what an earlier run left in --out: only what is not done is read.")
@option(
    "--blank-check/--no-blank-check",
    default=True,
    show_default=True,
    help="Call a page without any print blank instead of asking the model.",
)
@option(
    "--split/--no-split",
    default=True,
    show_default=True,
    help="Cut pages that are very tall, such as receipts, between lines, and read the pieces.",
)
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="What is logged to stderr.",
)
@engine_options(
    {"max_length": None, "compile": None},
    shown={"max_length": "what a page can need", "compile": f"from {COMPILE_FROM} pages on"},
)
@click.pass_obj
def read(
    registry: Registry,
    /,
    model: str,
    checkpoint: str | None,
    paths: Sequence[str],
    out: str | None,
    format: Format,
    resume: bool,
    pages: str | None,
    dpi: float,
    log_level: str,
    **values: Any,
) -> None:
    """Read pages: pictures, PDF and TIFF files, folders of them, and patterns such as 'scans/**/*.png'.

    Text goes to stdout in the order of the pages, or into a folder with --out, each page as soon as it is done. The last line on
    stderr says how many pages were read, blank and failed. The exit code is 0 when none failed, 1 when some did (the others are
    kept), 2 for options that cannot be used.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s", stream=sys.stderr)
    if resume and out is None:
        raise UsageError("--resume goes on with what is in a folder; name it with --out")
    spec, checkpoint_folder = resolve(registry, model, checkpoint)
    question, selection = _question(spec, values, format), _selection(pages)
    found = find_sources(paths)
    config = _config(question, values)

    from kaminari_core.documents.job import ReadJob, count_pages
    from kaminari_core.documents.writers import FolderWriter, StreamWriter

    total = count_pages(found.sources, selection, config)
    if values["compile"] is None:
        config = dataclasses.replace(config, compile=total >= COMPILE_FROM)
    settings = _settings(spec, checkpoint_folder, question, config)
    _note_left_out(found)
    with ExitStack() as opened:
        if out is None:
            stream = opened.enter_context(
                closing(StreamWriter(partial(click.echo, nl=False), format, several=total > 1))
            )
            job = ReadJob(found.sources, selection, dpi, question, config, settings, stream)
        else:
            folder = opened.enter_context(open_folder(Path(out), format, resume=resume))
            job = ReadJob(found.sources, selection, dpi, question, config, settings, FolderWriter(folder))
            opened.callback(lambda: folder.finish(job.order, job.hashes))
        _follow(job, total, partial(_opened, registry, spec, checkpoint_folder, config))
    if job.tally.failed:
        raise click.exceptions.Exit(1)


def _question(spec: ModelSpec, values: dict[str, Any], format: Format) -> Question:
    """What is asked of each page, from the options that are about it, which are taken out of `values`."""
    from kaminari_core.documents.pages import Question

    task, template = values.pop("task"), values.pop("template")
    held = {name: values.pop(name) for name in ("schema", "regex", "json_object", "strict")}
    if task not in spec.tasks:
        raise UnknownNameError(unknown_name(f"task of {spec.name}", task, spec.tasks))
    fields = None if template is None else read_template(template)
    try:
        prompt = fill(task, spec.tasks[task], fields)
    except RequestError as error:
        raise UsageError(f"--template: {error}") from error
    return Question(
        task=task,
        prompt=prompt,
        blank_check=values.pop("blank_check"),
        split=values.pop("split"),
        confidence=format in ("json", "jsonl"),
        structure=read_structure(**held, template=fields),
    )


def _selection(pages: str | None) -> PageSelection:
    try:
        return PageSelection() if pages is None else PageSelection.parse(pages, param="--pages")
    except RequestError as error:
        raise UsageError(str(error)) from error


def _config(question: Question, values: dict[str, Any]) -> EngineConfig:
    """The engine's settings, with a cache no longer than a page can need unless a length was given."""
    from kaminari_core.flow import ImagePart

    config = engine_config(**values)
    if values["max_length"] is not None:
        return config
    page = question.request(ImagePart(b""))
    return dataclasses.replace(config, max_length=needed_length(page.messages, config))


def _settings(spec: ModelSpec, folder: Path, question: Question, config: EngineConfig) -> dict[str, Any]:
    """What the text of a page depends on, beside the page."""
    asked = {name: getattr(question, name) for name in ("prompt", "blank_check", "split", "confidence")}
    if question.structure is not None:
        asked |= {"structure": [question.structure.kind, question.structure.text]}
    return {"model": spec.name, "checkpoint": _fingerprint(folder), **asked} | {
        name: getattr(config, name) for name in RESULT_SETTINGS
    }


def _fingerprint(folder: Path) -> str:
    """Tells a checkpoint from another, also from one with the same name: its files' names, sizes, beginnings and ends."""
    found = hashlib.sha256()
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        size = file.stat().st_size
        with file.open("rb") as opened:
            found.update(f"{file.name} {size}\n".encode() + opened.read(FINGERPRINT_BYTES))
            opened.seek(max(0, size - FINGERPRINT_BYTES))
            found.update(opened.read())
    return found.hexdigest()[:32]


@contextmanager
def _opened(registry: Registry, spec: ModelSpec, folder: Path, config: EngineConfig) -> Iterator[Engine]:
    from kaminari_core.launch import open_engine

    with terminal_progress() as progress:
        engine = open_engine(registry, spec.name, str(folder), config, progress)
    with closing(engine):
        yield engine


def _follow(job: ReadJob, total: int, opening: Callable[[], AbstractContextManager[Engine]]) -> None:
    """Run a job, showing how far it is; the last line on stderr says what became of the pages, also after Ctrl-C."""
    began = time.monotonic()
    with _bar(total) as bar, closing(job.run(opening)) as records:
        try:
            for record in records:
                _note(record, bar)
                bar.update()
        except (KeyboardInterrupt, KaminariError) as end:
            bar.close()
            how = "interrupted" if isinstance(end, KeyboardInterrupt) else "stopped"
            click.echo(f"{how}: {job.tally}; {max(0, total - job.tally.done)} not done", err=True)
            raise
    seconds = time.monotonic() - began
    new = job.tally.done - job.tally.before
    click.echo(f"{job.tally}; {seconds:.1f} s, {new / max(seconds, 1e-9):.2f} pages/s", err=True)


def _bar(total: int) -> tqdm[Never]:
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc="reading",
        unit=" pages",
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
        dynamic_ncols=True,
        smoothing=0.05,
    )


def _note(record: Record, bar: tqdm[Never]) -> None:
    """Say of a page that it failed, or was cut at a limit."""
    from kaminari_core.documents.writers import title

    if record["status"] == "failed":
        bar.write(f"failed: {title(record)}: {record['error']['message']}", file=sys.stderr)
    elif record["finish_detail"] == "loop":
        bar.write(f"note: {title(record)}: the reply began to repeat itself and was ended", file=sys.stderr)
    elif record["finish_reason"] == "length":
        flag = "--max-tokens" if record["finish_detail"] == "max_tokens" else "--max-length"
        bar.write(f"note: {title(record)}: the reply was cut at a limit ({flag})", file=sys.stderr)


def _note_left_out(found: Found) -> None:
    if found.left_out:
        few = ", ".join(map(repr, found.left_out[:3])) + (", ..." if len(found.left_out) > 3 else "")
        click.echo(f"note: {len(found.left_out)} files are neither pictures nor documents: {few}", err=True)
