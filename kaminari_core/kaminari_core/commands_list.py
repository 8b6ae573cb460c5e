"""`kaminari models` and `kaminari plugins`: what is installed, from facts alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import click

from kaminari_core.options import option
from kaminari_core.registry import Registry
from kaminari_core.specs import ModelSpec, Spec


@click.command()
@option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def models(registry: Registry, as_json: bool) -> None:
    """List the models that the installed plugins offer."""
    specs = registry.models.values()
    if as_json:
        click.echo(json.dumps([_model_facts(spec) for spec in specs], indent=2, ensure_ascii=False))
        return
    for spec in specs:
        _heading(spec)
        _line("checkpoints", [*spec.bundled, "DIR", "HUB_ID"])
        _line("model types", spec.model_types)
        _line("tasks", spec.tasks)
    if not specs:
        click.echo("No model is installed. A plugin brings one: pip install kaminari-qwen3vl")
    click.echo(registry.broken_summary(), nl=False)


@click.command()
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def plugins(registry: Registry, as_json: bool) -> None:
    """List the installed plugins, what each brings, and those that could not be loaded."""
    if as_json:
        loaded = [dataclasses.asdict(plugin) for plugin in registry.plugins]
        broken = [dataclasses.asdict(plugin) for plugin in registry.broken]
        click.echo(json.dumps({"plugins": loaded, "broken": broken}, indent=2, ensure_ascii=False))
        return
    for plugin in registry.plugins:
        click.echo(f"{plugin.name}  {plugin.distribution} {plugin.version}  ({plugin.target})")
        _line("hooks", plugin.hooks)
    for title, table in (
        ("Models", registry.models),
        ("Caches", registry.caches),
        ("Schedulers", registry.schedulers),
        ("Quantizers", registry.quantizers),
    ):
        if table:
            click.echo(f"\n{title}:")
        for spec in table.values():
            click.echo("  ", nl=False)
            _heading(spec)
    click.echo(registry.broken_summary(), nl=False)


def _model_facts(spec: ModelSpec) -> dict[str, object]:
    return {
        "name": spec.name,
        "summary": spec.summary,
        "target": spec.target,
        "model_types": list(spec.model_types),
        "checkpoints": list(spec.bundled),
        "tasks": dict(spec.tasks),
    }


def _heading(spec: Spec) -> None:
    click.echo(f"{spec.name}  {spec.summary}".rstrip())


def _line(title: str, words: Iterable[str]) -> None:
    text = ", ".join(words)
    if text:
        click.echo(f"  {title}: {text}")
