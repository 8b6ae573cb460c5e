"""`kaminari run`: one request from the command line, its text streamed to stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.errors import RequestError, UnknownNameError, UsageError
from kaminari_core.options import NumberRange, engine_config, engine_options, model_options, option
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry, unknown_name
from kaminari_core.specs import ModelSpec
from kaminari_core.structured.command_line import read_structure, structure_options
from kaminari_core.tasks import fill

if TYPE_CHECKING:
    from kaminari_core.config import EngineConfig
    from kaminari_core.engine import Engine
    from kaminari_core.flow import ImagePart, Message, Request, Result, Sampling
    from kaminari_core.structured.structure import Structure

TEMPLATE_TOKENS = 256
"""Room in the cache for what a chat template adds around the words and pictures of a request."""


@click.command()
@model_options
@option(
    "--image",
    "images",
    type=click.Path(),
    multiple=True,
    metavar="FILE",
    help="A picture; several are seen in the order given.",
)
@click.argument("prompt", required=False)
@option("--task", show_default="ocr when there are pictures", help="A task of the model instead of a PROMPT.")
@option(
    "--template",
    metavar="JSON|FILE",
    help='What a task such as extract is to read: a JSON object of empty strings, {"total": "", "date": ""}, or a file of it.',
)
@option("--system", metavar="TEXT", help="A system message before the prompt.")
@structure_options
@option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: text, finish_reason, finish_detail, usage, timings, saw.",
)
@option("--confidence", is_flag=True, help="With --json: how sure the model was of each line and JSON value.")
@option("--boxes", is_flag=True, help="With --json: the boxes that the reply writes, in pixels of the picture's file.")
@option(
    "--temperature",
    type=NumberRange(min=0),
    show_default="0",
    help="How freely tokens are drawn; 0 always takes the likeliest.",
)
@option(
    "--top-p",
    type=NumberRange(0, 1, min_open=True),
    show_default="1",
    help="Draw from the likeliest tokens that reach this probability together.",
)
@option("--top-k", type=click.IntRange(min=0), show_default="0", help="Draw from this many of the likeliest; 0 is off.")
@option("--seed", type=int, show_default="a fresh one", help="Seed for drawing tokens.")
@option(
    "--sampling",
    type=click.Choice(["greedy", "checkpoint"]),
    default="greedy",
    show_default=True,
    help="What the options above start from: greedy, or the checkpoint's own generation settings.",
)
@option("--stop", multiple=True, metavar="TEXT", help="End the reply before this text; may be given several times.")
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="What is logged to stderr.",
)
@engine_options(
    # One reply is over before compiling would pay.
    {"slots": 1, "max_length": None, "compile": False},
    shown={"max_length": "what the request can need"},
)
@click.pass_obj
def run(
    registry: Registry,
    /,
    model: str,
    checkpoint: str | None,
    images: Sequence[str],
    prompt: str | None,
    task: str | None,
    template: str | None,
    system: str | None,
    as_json: bool,
    confidence: bool,
    boxes: bool,
    log_level: str,
    **values: Any,
) -> None:
    """Answer one request: pictures with a task or a PROMPT, or a PROMPT alone.

    The text is streamed to stdout. The exit code is 0 after a reply, 2 for options that cannot be used, 1 for any other
    failure.
    """
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s", stream=sys.stderr)
    drawing = {name: values.pop(name) for name in ("temperature", "top_p", "top_k", "seed")}
    start, stop = values.pop("sampling"), tuple(values.pop("stop"))
    # What can be told without the model is told before it is loaded.
    if (confidence or boxes) and not as_json:
        raise UsageError("--confidence and --boxes are parts of the JSON object; give --json as well")
    spec, folder = resolve(registry, model, checkpoint)
    fields = None if template is None else read_template(template)
    words = _words(spec, prompt, task, bool(images), fields)
    held = {name: values.pop(name) for name in ("schema", "regex", "json_object", "strict")}
    structure = read_structure(**held, template=fields)
    _check_texts({"the PROMPT": words, "--system": system or "", "--stop": "".join(stop)})
    messages = _messages(words, system, images)
    config = _config(messages, values)
    with _opened(registry, spec, folder, config) as engine:
        request = _request(messages, _sampling(engine, start, drawing), stop, structure, confidence)
        if as_json:
            click.echo(json.dumps(_report(engine.generate(request), boxes=boxes), ensure_ascii=False))
        else:
            _stream(engine, request)


def _words(spec: ModelSpec, prompt: str | None, task: str | None, pictures: bool, template: Any) -> str:
    """The prompt, or the one that the task stands for."""
    if prompt is not None:
        if not prompt.strip() and not pictures:
            raise UsageError("there is nothing to answer: the PROMPT is empty")
        if task is not None:
            raise UsageError("give either --task or a PROMPT, not both")
        if template is not None:
            raise UsageError("--template belongs to a --task, not to a PROMPT")
        return prompt
    if task is None:
        if not pictures:
            raise UsageError("there is nothing to answer: give a PROMPT, or pictures with --image")
        task = "ocr"
    if task not in spec.tasks:
        raise UnknownNameError(
            f"{unknown_name(f'task of {spec.name}', task, spec.tasks)} A PROMPT may ask for anything."
        )
    try:
        return fill(task, spec.tasks[task], template)
    except RequestError as error:
        raise UsageError(f"--template: {error}") from error


def _check_texts(texts: Mapping[str, str]) -> None:
    """Raise UsageError for an argument whose bytes are no UTF-8, which Python hands over as lone surrogates."""
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{name} is not valid Unicode (character {error.start})") from error


def read_template(given: str) -> Any:
    """The JSON value that `--template` names: itself when it begins with a brace, else a file's. Raises UsageError."""
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the template file {given!r} cannot be read: {error}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"the template is no JSON: {error}") from error


def _messages(words: str, system: str | None, images: Sequence[str]) -> tuple[Message, ...]:
    from kaminari_core.flow import Message, TextPart

    user = Message("user", (*map(read_picture, images), TextPart(words)))
    return (user,) if system is None else (Message("system", (TextPart(system),)), user)


def read_picture(path: str) -> ImagePart:
    """A picture file as part of a message, named by its path. Raises UsageError when it cannot be read."""
    from kaminari_core.flow import ImagePart

    try:
        return ImagePart(Path(path).read_bytes(), name=path)
    except OSError as error:
        raise UsageError(f"the picture {path!r} cannot be read: {error.strerror}") from error


def _config(messages: Sequence[Message], values: Mapping[str, Any]) -> EngineConfig:
    """The engine's settings, with a cache no longer than this request can need unless a length was given."""
    config = engine_config(**values)
    if values["max_length"] is not None:
        return config
    return dataclasses.replace(config, max_length=needed_length(messages, config))


def needed_length(messages: Sequence[Message], config: EngineConfig) -> int:
    """Cache positions that prompt and reply cannot exceed, as a power of two so that few lengths are ever compiled.

    A byte of text is at most one token.
    """
    from kaminari_core.flow import ImagePart

    parts = [part for message in messages for part in message.parts]
    pictures = sum(isinstance(part, ImagePart) for part in parts)
    text = sum(len(part.text.encode()) for part in parts if not isinstance(part, ImagePart))
    needed = TEMPLATE_TOKENS + text + pictures * (config.visual_tokens + 2) + config.max_tokens
    return 1 << (needed - 1).bit_length()


def _opened(registry: Registry, spec: ModelSpec, folder: Path, config: EngineConfig) -> contextlib.closing[Engine]:
    from kaminari_core.launch import open_engine

    with terminal_progress() as progress:
        return contextlib.closing(open_engine(registry, spec.name, str(folder), config, progress))


def _sampling(engine: Engine, start: str, drawing: Mapping[str, Any]) -> Sampling:
    """The settings that `--sampling` names, with the options that were given on top."""
    from kaminari_core.flow import Sampling

    given = {name: value for name, value in drawing.items() if value is not None}
    return dataclasses.replace(engine.model.sampling_defaults if start == "checkpoint" else Sampling(), **given)


def _request(
    messages: tuple[Message, ...],
    sampling: Sampling,
    stop: tuple[str, ...],
    structure: Structure | None,
    confidence: bool,
) -> Request:
    from kaminari_core.flow import Request

    return Request(messages, stop=stop, sampling=sampling, structure=structure, confidence=confidence)


def _stream(engine: Engine, request: Request) -> None:
    from kaminari_core.flow import Delta, Failed, Finished

    text = ""
    for event in engine.stream(request):
        if isinstance(event, Delta):
            click.echo(event.text, nl=False)
            text += event.text
        if isinstance(event, Finished | Failed) and text and not text.endswith("\n"):
            click.echo()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            _note_cut(event.result)


def _note_cut(result: Result) -> None:
    """Say on stderr when the text ends where a limit was or a loop began, not where the model ended it."""
    if result.repeat is not None:
        copies, period = result.repeat.copies, result.repeat.period
        click.echo(
            f"note: the reply said the same {period} tokens {copies} times and was ended (--no-loop-guard lets it go on)",
            err=True,
        )
    if result.finish_reason == "length":
        flag = "--max-tokens" if result.finish_detail == "max_tokens" else "--max-length"
        cut = "" if result.complete is not False else " and has not the structure that was asked for"
        click.echo(f"note: the reply was cut after {result.usage.completion_tokens} tokens ({flag}){cut}", err=True)


def _report(result: Result, *, boxes: bool) -> dict[str, Any]:
    """What is printed: what every reply has, and what else this one has."""
    from kaminari_core.evidence.grounding import find_boxes

    facts = dataclasses.asdict(result)
    report = {name: facts[name] for name in ("text", "finish_reason", "finish_detail", "usage", "timings", "saw")}
    report |= {name: facts[name] for name in ("complete", "repeat", "confidence") if facts[name] is not None}
    if boxes:
        report["boxes"] = [dataclasses.asdict(box) for box in find_boxes(result.text, result.saw)]
    return report
