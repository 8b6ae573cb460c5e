"""`kaminari compare`: which model reads these pages better, faster, smaller, on one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.errors import UsageError
from kaminari_core.evaluation.task import check_task
from kaminari_core.options import engine_config, engine_options, option
from kaminari_core.progress import terminal_progress
from kaminari_core.registry import Registry


@click.command()
@option("--models", required=True, metavar="NAME,NAME,...", help="The models to compare; one alone works too.")
@option(
    "--checkpoints", metavar="DIR,DIR,...", help="One for each model, as for `run`. Without it, those of the plugins."
)
@option(
    "--set", "folder", required=True, metavar="DIR", help="Pages: pictures with a .txt beside each, or truths.json."
)
@option("--task", default="ocr", show_default=True, help="The task that asks each model to read.")
@option("--out", metavar="DIR", help="Write compare.md and compare.json there.")
@engine_options()
@click.pass_obj
def compare(
    registry: Registry,
    /,
    models: str,
    checkpoints: str | None,
    folder: str,
    task: str,
    out: str | None,
    **values: Any,
) -> None:
    """Let several models read the same pages with the same budget of visual tokens, and compare.

    One table: error rates, exact lines, tokens per second, memory. Each model runs in a process of its own. Needs the extra
    `kaminari-core[eval]`.
    """
    from kaminari_core.compare import report, table
    from kaminari_core.evaluation.extra import check_available
    from kaminari_core.evaluation.run import run_alone
    from kaminari_core.evaluation.sets import read_set

    check_available()
    config = engine_config(**values)
    wanted = _pairs(registry, models, checkpoints)
    # Whatever is wrong with a name is told before the first model is loaded.
    specs = [resolve(registry, model, checkpoint)[0] for model, checkpoint in wanted]
    for spec in specs:
        check_task(spec, task)
    pages = read_set(Path(folder))
    if any(page.text is None for page in pages):
        raise UsageError(f"the set {folder} has pages without a text, which is what is compared; use `kaminari eval`")
    found = []
    with terminal_progress() as progress:
        for done, (spec, (_, checkpoint)) in enumerate(zip(specs, wanted, strict=True)):
            progress("compare", done, len(wanted))
            found.append(run_alone(spec, checkpoint, pages, task, config))
        progress("compare", len(wanted), len(wanted))
    click.echo(table(found))
    if out:
        target = Path(out)
        target.mkdir(parents=True, exist_ok=True)
        (target / "compare.md").write_text(table(found) + "\n", encoding="utf-8")
        text = json.dumps(report(found, Path(folder), config), indent=1, ensure_ascii=False)
        (target / "compare.json").write_text(text + "\n", encoding="utf-8")


def _pairs(registry: Registry, models: str, checkpoints: str | None) -> list[tuple[str, str]]:
    names = [name.strip() for name in models.split(",")]
    if checkpoints is None:
        bundled = {name: next(iter(registry.model(name).bundled), None) for name in names}
        if missing := [name for name, checkpoint in bundled.items() if checkpoint is None]:
            raise UsageError(f"{', '.join(missing)} brings no checkpoint; give one for each model with --checkpoints")
        return [(name, str(checkpoint)) for name, checkpoint in bundled.items()]
    folders = [folder.strip() for folder in checkpoints.split(",")]
    if len(folders) != len(names):
        raise UsageError(
            f"--models names {len(names)}, --checkpoints {len(folders)}: give one checkpoint for each model"
        )
    return list(zip(names, folders, strict=True))
