"""`kaminari compile`: compile ahead of time, so that the next start finds everything."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.errors import UsageError
from kaminari_core.options import engine_config, engine_options, model_options, option
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry


@click.command("compile")
@model_options
@option("--clear", is_flag=True, help="Forget first what was compiled before by this version of torch, for any model.")
@option(
    "--report", "measured", is_flag=True, help="Measure first which parts of the vision tower gain, and compile those."
)
@option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@option("--out", metavar="FILE", help="Write the figures as JSON, with machine, versions and settings.")
@engine_options()
@click.pass_obj
def compile_(
    registry: Registry,
    /,
    model: str,
    checkpoint: str | None,
    clear: bool,
    measured: bool,
    as_json: bool,
    out: str | None,
    **values: Any,
) -> None:
    """Compile a model's decode step ahead of time and keep it for later starts.

    Give the flags that `serve` will be given: slots, length, drafts, data type and quantizer decide what is compiled. It is kept
    in the directory that KAMINARI_CACHE_DIR names, `~/.cache/kaminari` unless set, and may be deleted at any time.

    With `--report`, each part of the vision tower is measured on a picture of `--visual-tokens`: eagerly, compiled, and what its
    graph costs cold and warm. What wins is remembered for this machine, and compiled wherever `--compile-vision` is auto.
    """
    from kaminari_core.cache_directory import keep_graphs
    from kaminari_core.compiling import measure_vision, report, start, start_again

    config = engine_config(**values)
    if not config.compile:
        raise UsageError("with --no-compile there is nothing to compile")
    if clear:
        for entry in keep_graphs().glob("*"):
            shutil.rmtree(entry)
    spec, folder = resolve(registry, model, checkpoint)
    with terminal_progress() as progress:
        parts = measure_vision(registry, spec, folder, config, progress) if measured else []
        first = start(registry, spec.name, str(folder), config, progress)
    found = report(first, start_again(spec.name, str(folder), config), parts)
    click.echo(json.dumps(found, indent=1) if as_json else _table(found))
    if out:
        from kaminari_core.bench import measured_where
        from kaminari_core.placement import resolve_device

        written = {**measured_where(resolve_device(config.device)), "config": asdict(config), **found}
        Path(out).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _table(found: dict[str, Any]) -> str:
    lines = []
    if found["parts"]:
        lines = [f"{'part':18} {'eager ms':>9} {'compiled':>9} {'cold s':>7} {'warm s':>7}  pays after"]
        lines += [
            f"{each['name']:18} {each['eager_ms']:9.1f} {each['compiled_ms']:9.1f} {each['cold']:7.1f} {each['warm']:7.1f}  "
            + (
                "never: it stays eager"
                if not each["wins"]
                else f"{each['pays_cold']} pictures, {each['pays_warm']} warm"
            )
            for each in found["parts"]
        ]
        lines.append("")
    lines.append(f"{'start':28} {'compiled':>8} {'found':>6} {'load s':>8} {'graphs s':>9}")
    lines += [
        f"{each['start']:28} {each['compiled']:8} {each['found']:6} {each['load_seconds']:8.1f} {each['graph_seconds']:9.1f}"
        for each in found["starts"]
    ]
    return "\n".join([*lines, f"kept in {found['directory']}"])
