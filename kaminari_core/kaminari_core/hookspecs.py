"""The six hooks of kaminari. Entry-point group: `kaminari`; each entry point names a module or object with hook implementations.

They are asked once at start-up; the objects behind the specs are then called directly, so no hook is on the hot path. All but
the last two return an iterable of frozen specs, which import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click

    from kaminari_core.serving import Serving
    from kaminari_core.specs import CacheSpec, ModelSpec, QuantizerSpec, SchedulerSpec

hookspec = pluggy.HookspecMarker("kaminari")
hookimpl = pluggy.HookimplMarker("kaminari")


@hookspec
def kaminari_models() -> Iterable[ModelSpec]:  # type: ignore[empty-body]
    """Model architectures.

    @hookimpl
    def kaminari_models():
        return [ModelSpec(name="mymodel", target="my_package.model:load", model_types=("my_model",))]
    """


@hookspec
def kaminari_caches() -> Iterable[CacheSpec]:  # type: ignore[empty-body]
    """KV caches.

    @hookimpl
    def kaminari_caches():
        return [CacheSpec(name="mycache", target="my_package.cache:MyCache")]
    """


@hookspec
def kaminari_schedulers() -> Iterable[SchedulerSpec]:  # type: ignore[empty-body]
    """Admission policies.

    @hookimpl
    def kaminari_schedulers():
        return [SchedulerSpec(name="shortest", target="my_package.scheduler:ShortestFirst")]
    """


@hookspec
def kaminari_quantizers() -> Iterable[QuantizerSpec]:  # type: ignore[empty-body]
    """Weight quantizers.

    @hookimpl
    def kaminari_quantizers():
        return [QuantizerSpec(name="int3", target="my_package.int3:Int3")]
    """


@hookspec
def kaminari_commands(cli: click.Group) -> None:
    """Add commands to the `kaminari` program.

    @hookimpl
    def kaminari_commands(cli):
        @cli.command()
        def hello():
            click.echo("hello")
    """


@hookspec
def kaminari_routes(engines: Mapping[str, Serving]) -> Iterable[Any]:  # type: ignore[empty-body]
    """Starlette routes for the HTTP server; `engines` maps served model names to engines.

    @hookimpl
    def kaminari_routes(engines):
        return [Route("/hello", lambda request: PlainTextResponse("hello"))]
    """
