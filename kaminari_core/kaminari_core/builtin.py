"""The core's own plugin: its cache, schedulers and commands come through the same hooks as everybody's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kaminari_core.hookspecs import hookimpl
from kaminari_core.specs import CacheSpec, QuantizerSpec, SchedulerSpec

if TYPE_CHECKING:
    import click


@hookimpl
def kaminari_caches() -> Iterable[CacheSpec]:
    """The static cache."""
    return [
        CacheSpec(
            name="static",
            target="kaminari_core.cache:StaticCache",
            summary="one preallocated row of keys and values per slot",
        )
    ]


@hookimpl
def kaminari_schedulers() -> Iterable[SchedulerSpec]:
    """The admission policies."""
    return [
        SchedulerSpec(
            name="continuous",
            target="kaminari_core.scheduler:ContinuousScheduler",
            summary="fill free slots at any step, interactive requests first",
        ),
        SchedulerSpec(
            name="microbatch",
            target="kaminari_core.scheduler:MicrobatchScheduler",
            summary="wait a moment for company, then serve the group as one batch",
        ),
        SchedulerSpec(
            name="streaming",
            target="kaminari_core.scheduler:StreamingScheduler",
            summary="one request at a time",
        ),
    ]


@hookimpl
def kaminari_quantizers() -> Iterable[QuantizerSpec]:
    """The weight-only quantizers."""
    return [
        QuantizerSpec(
            name="int4",
            target="kaminari_core.quantization.weight_only:int4",
            summary="4-bit weights in groups, activations as they are",
        ),
        QuantizerSpec(
            name="int8",
            target="kaminari_core.quantization.weight_only:int8",
            summary="8-bit weights in groups, activations as they are",
        ),
    ]


@hookimpl
def kaminari_commands(cli: click.Group) -> None:
    """The commands of the core; each lies in a module of its own."""
    from kaminari_core.commands_bench import bench
    from kaminari_core.commands_check import check
    from kaminari_core.commands_compare import compare
    from kaminari_core.commands_compile import compile_
    from kaminari_core.commands_doctor import doctor
    from kaminari_core.commands_eval import evaluate
    from kaminari_core.commands_fit import fit
    from kaminari_core.commands_list import models, plugins
    from kaminari_core.commands_quantize import quantize
    from kaminari_core.commands_read import read
    from kaminari_core.commands_run import run

    for command in (models, plugins, doctor, fit, run, read, bench, check, compare, compile_, evaluate, quantize):
        cli.add_command(command)
