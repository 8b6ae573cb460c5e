"""What kaminari-http adds: the command `serve` and the routes of the server. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kaminari_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import click
    from starlette.routing import BaseRoute


@hookimpl
def kaminari_commands(cli: click.Group) -> None:
    """`kaminari serve`."""
    from kaminari_http.serve import serve

    cli.add_command(serve)


@hookimpl
def kaminari_routes() -> Iterable[BaseRoute]:
    """Health and metrics, the OpenAI routes and the native ones."""
    from kaminari_http import app, completions, native, ocr, openai, openapi, page, responses, tokenize

    return [
        route
        for each in (app, page, openapi, openai, completions, responses, ocr, native, tokenize)
        for route in each.routes()
    ]
