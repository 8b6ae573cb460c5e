"""`kaminari eval`: how well a model reads a set of pages, over a grid of configurations, and how well it knows how sure it is."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.errors import UsageError
from kaminari_core.evaluation.task import check_task
from kaminari_core.options import engine_config, engine_options, model_options, option
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry

if TYPE_CHECKING:
    from kaminari_core.config import EngineConfig
    from kaminari_core.engine import Engine
    from kaminari_core.evaluation.sample import Sample
    from kaminari_core.protocols import Progress


@click.command("eval")
@click.argument("axes", nargs=-1, metavar="[AXIS=VALUE,VALUE]...")
@model_options
@option("--set", "folder", required=True, metavar="DIR", help="Pages with their truths, in any of the known layouts.")
@option("--layout", metavar="NAME", help="The set's layout, when it is not to be guessed from its files.")
@option("--task", default="ocr", show_default=True, help="What is asked of a page that has no question of its own.")
@option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N pages.")
@option(
    "--sweep", is_flag=True, help="Evaluate every combination of the axes' values, such as tokens=64,128 sizing=exact."
)
@option(
    "--packed", metavar="DIR", help="Keep the packed checkpoints of a sweep over quantizers there, and use them again."
)
@option("--calibrate", is_flag=True, help="Compare how sure the model is of lines with how often they are right.")
@option("--worst", default=20, show_default=True, metavar="N", help="Pages that the HTML report shows.")
@option("--out", metavar="DIR", help="Write reports there: eval.*, sweep.* or calibration.*, by what is asked for.")
@engine_options({"compile": False})
@click.pass_obj
def evaluate(
    registry: Registry,
    /,
    axes: Sequence[str],
    model: str,
    checkpoint: str | None,
    folder: str,
    layout: str | None,
    task: str,
    limit: int | None,
    sweep: bool,
    packed: str | None,
    calibrate: bool,
    worst: int,
    out: str | None,
    **values: Any,
) -> None:
    """Measure how well a model reads: error rates, fields, answers, tables, speed, memory.

    Failed and blank pages count as read wrong. Needs the extra `kaminari-core[eval]`; docs/evaluation.md says what a figure
    means.
    """
    from kaminari_core.evaluation.extra import check_available
    from kaminari_core.evaluation.sets import read_set

    check_available()
    if sweep != bool(axes) or (sweep and calibrate):
        raise UsageError("--sweep takes the axes of a grid, such as `--sweep tokens=64,128`, and excludes --calibrate")
    config = engine_config(**values)
    spec, _ = resolve(registry, model, checkpoint)
    check_task(spec, task)
    samples = read_set(Path(folder), layout)[:limit]
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
    job = Job(registry, model, checkpoint, Path(folder), samples, task, config, Path(out) if out else None)
    if sweep:
        job.sweep(axes, packed)
    elif calibrate:
        job.calibrate()
    else:
        job.evaluate(worst)


@dataclass(frozen=True, slots=True)
class Job:
    """What is evaluated on which samples. Each method prints its result and writes its reports into `out`, if there is one."""

    registry: Registry
    model: str
    checkpoint: str | None
    folder: Path
    samples: Sequence[Sample]
    task: str
    config: EngineConfig
    out: Path | None

    def evaluate(self, worst: int) -> None:
        """One configuration, with the report of the worst pages."""
        from kaminari_core.evaluation.report import as_json, summary
        from kaminari_core.evaluation.report_html import as_html
        from kaminari_core.evaluation.run import evaluate

        with self._engine() as (engine, progress):
            found = evaluate(engine, self.checkpoint or self.model, self.samples, self.task, progress)
        self._tell("eval", summary(found), as_json(found), found.machine)
        if self.out:
            files = {sample.name: sample.file for sample in self.samples}
            (self.out / "eval.html").write_text(as_html(found, files, worst), encoding="utf-8")

    def sweep(self, words: Sequence[str], packed: str | None) -> None:
        """A grid of configurations, each in a process of its own, with plots where matplotlib is installed."""
        from kaminari_core.evaluation import plots
        from kaminari_core.evaluation.packed import pack_for
        from kaminari_core.evaluation.run import Evaluation, run_alone
        from kaminari_core.evaluation.sweep import configurations, parse_axes, sweep
        from kaminari_core.evaluation.sweep_report import as_json, table

        axes = parse_axes(words)
        grid = configurations(self.config, axes)
        if self.out and not plots.is_available():
            click.echo(f"no plots are drawn: {plots.MISSING}", err=True)

        spec, source = resolve(self.registry, self.model, self.checkpoint)
        with terminal_progress() as progress, tempfile.TemporaryDirectory(prefix="kaminari-eval-") as temporary:
            place = Path(packed or temporary)
            checkpoints = pack_for(self.registry, spec, source, axes.get("quantizer", ()), place, progress)

            def evaluate(config: EngineConfig) -> Evaluation:
                checkpoint = str(checkpoints.get(config.quantizer, source))
                return run_alone(spec, checkpoint, self.samples, self.task, config)

            rows = sweep(grid, evaluate, progress)
        machine = next(row.evaluation.machine for row in rows if row.evaluation)
        self._tell("sweep", table(rows), {"axes": axes, "rows": as_json(rows)}, machine)
        if self.out and plots.is_available():
            plots.plot_sweep(rows, self.out)

    def calibrate(self) -> None:
        """Confidences of lines against the truth, and the temperature that brings the two together."""
        from kaminari_core.bench import machine_facts
        from kaminari_core.evaluation.calibrate import as_json, best, calibrate, table
        from kaminari_core.evaluation.reading import read_samples

        with self._engine() as (engine, progress):
            outcomes = read_samples(engine, self.samples, self.task, progress, confidence=True)
            name, machine = engine.name, machine_facts(engine.model.device)
        found = calibrate(outcomes)
        self._tell("calibration-report", table(found), {"measures": as_json(found)}, machine)
        if self.out:
            best(found).calibration(name, self.folder.name).write(self.out / "calibration.json")

    @contextlib.contextmanager
    def _engine(self) -> Iterator[tuple[Engine, Progress]]:
        from kaminari_core.launch import open_engine

        with terminal_progress() as progress:
            engine = open_engine(self.registry, self.model, self.checkpoint, self.config, progress)
            with contextlib.closing(engine):
                yield engine, progress

    def _tell(self, name: str, text: str, record: dict[str, Any], machine: dict[str, Any]) -> None:
        from kaminari_core.evaluation.report import footer, provenance

        click.echo(text)
        if self.out:
            whole = f"{text}\n\n{footer(machine)}\n"
            (self.out / f"{name}.md").write_text(whole, encoding="utf-8")
            full = {**provenance(self.folder.name, len(self.samples)), **record}
            encoded = json.dumps(full, indent=1, ensure_ascii=False) + "\n"
            (self.out / f"{name}.json").write_text(encoded, encoding="utf-8")
