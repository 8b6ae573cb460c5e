"""The core's own plugin: its cache, schedulers and commands come through the same hooks as everybody's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kaminari_core.hookspecs import hookimpl
from kaminari_core.specs import CacheSpec, SchedulerSpec

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
            summary="admit in order of arrival, as soon as a slot is free",
        )
    ]


@hookimpl
def kaminari_commands(cli: click.Group) -> None:
    """The commands `models`, `plugins`, `run` and `bench`."""
    from kaminari_core.commands_bench import bench
    from kaminari_core.commands_list import models, plugins
    from kaminari_core.commands_run import run

    for command in (models, plugins, run, bench):
        cli.add_command(command)
