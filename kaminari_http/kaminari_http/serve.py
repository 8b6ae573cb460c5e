"""`kaminari serve`: open an engine and serve it until a signal says stop.

Everything heavy is imported when the command runs, so that `kaminari --help` stays quick.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, get_args

import click

from kaminari_core.errors import EngineError, UsageError
from kaminari_core.options import NumberRange, engine_config, engine_options, option
from kaminari_core.registry import Registry
from kaminari_http.config import AppConfig
from kaminari_http.logs import Format, set_up_logging

if TYPE_CHECKING:
    from kaminari_core.config import EngineConfig
    from kaminari_core.serving import Serving
    from kaminari_http.app import Service
    from kaminari_http.server import Server

logger = logging.getLogger(__name__)
FAILURE_SECONDS = 0.5
"""How often the engines are looked at with --exit-on-failure."""


@click.command()
@option(
    "--model",
    "models",
    required=True,
    multiple=True,
    metavar="NAME|DIR",
    help="A model that a plugin offers (see `kaminari models`), or a checkpoint directory, whose config.json names it; may be "
    "given several times, each with an engine of its own.",
)
@option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="DIR|NAME|HUB_ID",
    help="A directory, a checkpoint that comes with the plugin, such as `tiny`, or owner/name on the Hugging Face hub: one for "
    "each --model, in the same order. Without it, the ones that come with the plugins.",
)
@option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every interface.")
@option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="A key that clients must send as `Authorization: Bearer KEY`; may be given several times. Everything but health and "
    "the page / asks for it.",
)
@option(
    "--served-model-name",
    "served_names",
    multiple=True,
    metavar="NAME",
    help="The name that requests use for the model: one for each --model, in the same order.  [default: the plugin's name]",
)
@option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="An origin whose web pages may call the server, such as https://example.org, or *; may be given several times.",
)
@option(
    "--allow-media-host",
    "allow_media_hosts",
    multiple=True,
    metavar="HOST[:PORT]",
    help="A host that pictures may be fetched from, when a request names them by http(s) URL; may be given several times. "
    "Addresses that are not public are used only when given literally, such as 192.168.1.5:8080.",
)
@option(
    "--max-body",
    type=click.IntRange(min=1),
    default=AppConfig().max_body,
    show_default=True,
    metavar="BYTES",
    help="The largest request body; pictures travel in it as base64.",
)
@option(
    "--max-pages",
    type=click.IntRange(min=1),
    default=AppConfig().max_pages,
    show_default=True,
    help="The most pages of a document that one request to /v1/ocr may have read.",
)
@option(
    "--warm-up/--no-warm-up",
    default=False,
    show_default=True,
    help="Compile every shape of the decode step before the first request instead of when one needs it.",
)
@option(
    "--in-process",
    is_flag=True,
    help="Run the engine in the server's own process. Otherwise it has one of its own, which is replaced when it dies or hangs.",
)
@option(
    "--exit-on-failure",
    is_flag=True,
    help="End with exit code 1 when an engine has stopped for good or fails repeatedly, for whoever starts the server anew then.",
)
@option(
    "--drain-seconds",
    type=NumberRange(0, threading.TIMEOUT_MAX),
    default=20.0,
    show_default=True,
    help="How long running requests may go on after SIGTERM or Ctrl-C before they are ended with an error.",
)
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged to stderr.",
)
@option(
    "--log-format",
    type=click.Choice(get_args(Format)),
    default="text",
    show_default=True,
    help="Lines for people, or one JSON object a line. Neither shows prompts, replies or pictures.",
)
@engine_options()
@click.pass_obj
def serve(
    registry: Registry,
    /,
    models: Sequence[str],
    checkpoints: Sequence[str],
    host: str,
    port: int,
    api_keys: Sequence[str],
    served_names: Sequence[str],
    cors_origins: Sequence[str],
    allow_media_hosts: Sequence[str],
    max_body: int,
    max_pages: int,
    warm_up: bool,
    in_process: bool,
    exit_on_failure: bool,
    drain_seconds: float,
    log_level: str,
    log_format: Format,
    **engine_values: Any,
) -> None:
    """Serve models over HTTP: OpenAI's chat completions, our own routes, metrics.

    One line with the address is printed when requests can be served. SIGTERM or Ctrl-C ends the server: it takes no more
    requests and lets the running ones finish; a second signal does not wait for them. The exit code is 0.
    """
    from kaminari_http.server import Server, listen

    config = engine_config(**engine_values)
    app_config = AppConfig(
        api_keys=tuple(api_keys),
        cors_origins=tuple(cors_origins),
        max_body=max_body,
        max_pages=max_pages,
        allow_media_hosts=tuple(allow_media_hosts),
    )
    wanted = _pair_up(models, checkpoints, served_names)
    # The port first: whether it can be had is known at once, a model takes its time to load.
    with closing(listen(host, port)) as listener, _ended_by_signals():
        set_up_logging(log_level, log_format)
        from kaminari_http.app import build_app, loading_app

        with Server(loading_app(app_config), listener) as server, ExitStack() as opened:
            engines = _open_engines(registry, wanted, config, opened, warm_up=warm_up, in_process=in_process)
            app = build_app(engines, registry.routes(engines), app_config)
            server.app = app
            click.echo(f"kaminari serves {', '.join(engines)} at {server.url}")
            _wait(server, app.state.service, drain_seconds, exit_on_failure=exit_on_failure)


Wanted = tuple[str, str | None, str | None]
"""A model, its checkpoint and the name that requests use, as they were given."""


def _pair_up(models: Sequence[str], checkpoints: Sequence[str], names: Sequence[str]) -> list[Wanted]:
    """The options that belong together by their order. Raises UsageError when one is given neither never nor for each model."""
    for flag, given in (("--checkpoint", checkpoints), ("--served-model-name", names)):
        if given and len(given) != len(models):
            raise UsageError(
                f"there are {len(models)} --model and {len(given)} {flag}; give one {flag} for each model, in the same order, "
                "or none"
            )
    nothing = [None] * len(models)
    wanted = list(zip(models, checkpoints or nothing, names or nothing, strict=True))
    _refuse_twins([name or model for model, _, name in wanted])
    return wanted


def _refuse_twins(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models would be served as {name!r}; give each a --served-model-name")


def _open_engines(
    registry: Registry,
    wanted: Sequence[Wanted],
    config: EngineConfig,
    opened: ExitStack,
    *,
    warm_up: bool,
    in_process: bool,
) -> dict[str, Serving]:
    """Running engines by served name; `opened` closes them, also those that are open when a later one fails."""
    from kaminari_core.launch import open_engine, open_supervised
    from kaminari_core.progress import terminal_progress

    engines: dict[str, Serving] = {}
    opening: Callable[..., Serving] = open_engine if in_process else open_supervised
    for model, checkpoint, name in wanted:
        with terminal_progress() as progress:
            engine = opening(registry, model, checkpoint, config, progress, name, warm_up=warm_up)
        opened.callback(engine.close)
        # Two directories may turn out to be of one model.
        _refuse_twins([*engines, engine.name])
        engines[engine.name] = engine
    return engines


def _wait(server: Server, service: Service, drain_seconds: float, *, exit_on_failure: bool) -> None:
    """Serve until a signal comes, then let running requests finish. Raises EngineError for an end that nobody asked for."""
    try:
        while not server.wait(FAILURE_SECONDS if exit_on_failure else None):
            if reason := service.failure():
                raise EngineError(f"{reason} (--exit-on-failure)")
        raise EngineError("the HTTP server ended by itself; the log says why")
    except KeyboardInterrupt:
        logger.info("shutting down; running requests may go on for %g s", drain_seconds)
        service.unavailable = "The server is shutting down."
        # Together, so that the limit holds for all of them; and without waiting for the threads when a second signal comes.
        pool = ThreadPoolExecutor(len(service.engines))
        for draining in [pool.submit(engine.close, drain_seconds) for engine in service.engines.values()]:
            draining.result()
        logger.info("stopped")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM interrupts the main thread as Ctrl-C does, and for a server both are a good end."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        logger.info("stopped at once")
    finally:
        signal.signal(signal.SIGTERM, before)
