"""`kaminari fit`: what a model takes and what fits, from config.json and tensor headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.errors import UsageError
from kaminari_core.fit.memory import Budget
from kaminari_core.options import engine_config, model_options, option
from kaminari_core.registry import Registry
from kaminari_core.specs import ModelSpec

_DEFAULTS = EngineConfig()


@click.command()
@model_options
@option("--vram", metavar="SIZE", help="The memory to plan for, such as 6g or 6144m.  [default: what the device has]")
@option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="The kind of device. No card has to be there.",
)
@option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default=_DEFAULTS.dtype,
    show_default=True,
    help="The dtype to compute in, as for `kaminari serve`.",
)
@option(
    "--quantizer",
    default=_DEFAULTS.quantizer,
    show_default=True,
    help="Plan as if the decoder's linear layers were quantized: int4 or int8. A packed directory is planned as it is.",
)
@option(
    "--head",
    type=click.Choice(["none", "int4", "int8"]),
    default="none",
    show_default=True,
    help="Plan as if the output head were quantized as well.",
)
@option("--slots", type=int, default=_DEFAULTS.slots, show_default=True, help="Requests decoded together.")
@option("--max-length", type=int, default=_DEFAULTS.max_length, show_default=True, help="Cache positions of one slot.")
@option(
    "--visual-tokens",
    type=int,
    default=_DEFAULTS.visual_tokens,
    show_default=True,
    help="Visual tokens of the largest picture.",
)
@option(
    "--prefill-chunk",
    type=int,
    default=_DEFAULTS.prefill_chunk,
    show_default=True,
    help="Prompt tokens that run through the decoder at once.",
)
@option(
    "--draft",
    type=click.Choice(["none", "prompt-lookup", "mtp"]),
    default=_DEFAULTS.draft,
    show_default=True,
    help="Speculative decoding.",
)
@option("--draft-tokens", type=int, default=_DEFAULTS.draft_tokens, show_default=True, help="Tokens guessed at a time.")
@option("--compile/--no-compile", default=_DEFAULTS.compile, show_default=True, help="Compile the decode step.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
@click.pass_obj
def fit(
    registry: Registry,
    /,
    model: str,
    checkpoint: str | None,
    vram: str | None,
    head: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Say what a model takes and what fits: the largest page, slots, length, and the options to start with.

    Nothing is loaded and no card is needed. The checkpoint may be a directory with config.json only, or a published size that
    the plugin knows, such as 2b; without --checkpoint, all of these are compared. The exit code is 0 when the options as given
    fit, else 1.
    """
    config = engine_config(**values)
    budget = _budget(vram, config.device)
    found = _checkpoints(registry, model, checkpoint)
    if len(found) > 1:
        fits = _compare(found, config, budget, head, as_json=as_json)
    else:
        [(name, (spec, folder))] = found.items()
        fits = _explain(name, spec, folder, config, budget, head, as_json=as_json)
    if not fits:
        raise click.exceptions.Exit(1)


def _budget(vram: str | None, device: str) -> Budget:
    """The memory to plan for. Raises UsageError when neither the flag nor the machine says."""
    from kaminari_core.fit.memory import free_on_card, free_on_cpu, given

    budget = given(vram) if vram is not None else free_on_cpu() if device == "cpu" else free_on_card()
    if budget is None:
        raise UsageError(f"there is no telling how much memory the device {device} has here; give it with --vram 6g")
    return budget


def _checkpoints(registry: Registry, model: str, checkpoint: str | None) -> Mapping[str, tuple[ModelSpec, Path]]:
    """What is asked about, by name: one checkpoint, or every published size where none is named."""
    from kaminari_core.fit.cases import published

    spec = registry.models.get(model)
    if spec is not None and checkpoint is None and spec.shapes:
        return {size: (spec, published(spec, size)) for size in spec.shapes}
    if spec is not None and checkpoint is not None and checkpoint in spec.shapes and not Path(checkpoint).is_dir():
        return {checkpoint: (spec, published(spec, checkpoint))}
    found, folder = resolve(registry, model, checkpoint)
    return {checkpoint or model: (found, folder)}


def _explain(
    name: str,
    spec: ModelSpec,
    folder: Path,
    config: EngineConfig,
    budget: Budget,
    head: str,
    *,
    as_json: bool,
) -> bool:
    """Print the plan of one checkpoint; whether it fits."""
    from kaminari_core.fit import report
    from kaminari_core.fit.cases import make_case
    from kaminari_core.fit.choice import answer

    case = make_case(spec, folder, config, config.device, head=head)
    found = answer(case, config, budget)
    if as_json:
        click.echo(json.dumps({"model": spec.name, "checkpoint": name, **report.facts(found)}, indent=2))
    else:
        click.echo(report.table(found, f"{spec.name} {name} on {case.device} in {case.dtype}"))
    return found.fits


def _compare(
    found: Mapping[str, tuple[ModelSpec, Path]], config: EngineConfig, budget: Budget, head: str, *, as_json: bool
) -> bool:
    """Print one line for each size; whether any fits."""
    from kaminari_core.fit import report
    from kaminari_core.fit.cases import make_case
    from kaminari_core.fit.choice import answer

    answers = {
        name: answer(make_case(spec, folder, config, config.device, head=head), config, budget)
        for name, (spec, folder) in found.items()
    }
    if as_json:
        click.echo(json.dumps({name: report.facts(each) for name, each in answers.items()}, indent=2))
    else:
        click.echo(report.summary_head(budget))
        for name, each in answers.items():
            click.echo(report.summary(each, name))
    return any(each.fits for each in answers.values())
