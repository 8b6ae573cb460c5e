"""`kaminari eval`: how well a model reads a set of pages, with reports that show where it fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.evaluation.task import check_task
from kaminari_core.options import engine_config, engine_options, model_options, option
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry

if TYPE_CHECKING:
    from kaminari_core.config import EngineConfig
    from kaminari_core.evaluation.run import Evaluation
    from kaminari_core.evaluation.sample import Sample


@click.command("eval")
@model_options
@option("--set", "folder", required=True, metavar="DIR", help="Pages with their truths, in any of the known layouts.")
@option("--layout", metavar="NAME", help="The set's layout, when it is not to be guessed from its files.")
@option("--task", default="ocr", show_default=True, help="What is asked of a page that has no question of its own.")
@option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N pages.")
@option("--worst", default=20, show_default=True, metavar="N", help="Pages that the HTML report shows.")
@option("--out", metavar="DIR", help="Write eval.json, eval.md and eval.html there.")
@engine_options()
@click.pass_obj
def evaluate(
    registry: Registry,
    /,
    model: str,
    checkpoint: str | None,
    folder: str,
    layout: str | None,
    task: str,
    limit: int | None,
    worst: int,
    out: str | None,
    **values: Any,
) -> None:
    """Measure how well a model reads: error rates, fields, answers, tables, speed, memory.

    Failed and blank pages count as read wrong. Needs the extra `kaminari-core[eval]`; docs/evaluation.md says what a figure
    means.
    """
    from kaminari_core.evaluation.extra import check_available
    from kaminari_core.evaluation.report import summary
    from kaminari_core.evaluation.sets import read_set

    check_available()
    config = engine_config(**values)
    spec, _ = resolve(registry, model, checkpoint)
    check_task(spec, task)
    samples = read_set(Path(folder), layout)[:limit]
    found = _evaluate(registry, model, checkpoint, samples, task, config)
    click.echo(summary(found))
    if out:
        write_reports(Path(out), found, Path(folder), samples, worst)


def write_reports(out: Path, found: Evaluation, folder: Path, samples: Sequence[Sample], worst: int) -> None:
    """Write the three reports of an evaluation into a directory, which is made when it is missing."""
    from kaminari_core.evaluation.report import as_json, provenance, summary
    from kaminari_core.evaluation.report_html import as_html

    out.mkdir(parents=True, exist_ok=True)
    (out / "eval.md").write_text(summary(found) + "\n", encoding="utf-8")
    record = {**provenance(folder.name, len(samples)), **as_json(found)}
    (out / "eval.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = as_html(found, {sample.name: sample.file for sample in samples}, worst)
    (out / "eval.html").write_text(page, encoding="utf-8")


def _evaluate(
    registry: Registry,
    model: str,
    checkpoint: str | None,
    samples: Sequence[Sample],
    task: str,
    config: EngineConfig,
) -> Evaluation:
    from kaminari_core.evaluation.run import evaluate
    from kaminari_core.launch import open_engine

    with terminal_progress() as progress:
        engine = open_engine(registry, model, checkpoint, config, progress)
        try:
            return evaluate(engine, checkpoint or model, samples, task, progress)
        finally:
            engine.close()
