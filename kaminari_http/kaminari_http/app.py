"""The ASGI app: routes from the plugins, the middleware around them, and the state of this server.

`build_app` takes engines and routes as values; where they come from (the command line, a test) is not its business. The routes
that every server has, `/health` and `/metrics`, are `routes()` and come through the same hook as all others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kaminari_core.errors import EngineClosedError, EngineError, EngineUnhealthyError, RequestError
from kaminari_core.serving import Serving
from kaminari_http import page
from kaminari_http.config import AppConfig
from kaminari_http.errors import failure_of, unavailable
from kaminari_http.media import Media
from kaminari_http.metrics import CONTENT_TYPE, Metrics
from kaminari_http.middleware import REQUEST_ID, Authentication, BodyLimit, Failures, RequestIds

RECENT_SECONDS = 10.0
"""A decode step that succeeded this lately is not run again to see whether it would."""
PROBE_SECONDS = 10.0


class Health(msgspec.Struct):
    """The answer of the health paths when all is well."""

    status: Literal["ok"] = "ok"


class DecodeHealth(msgspec.Struct):
    """As `Health`, with how many seconds ago each engine's last decode step succeeded."""

    seconds_since_step: dict[str, float]
    status: Literal["ok"] = "ok"


@dataclass(slots=True)
class Service:
    """What the handlers share, kept at `app.state.service`.

    `unavailable` is why nothing can be answered now (loading, shutting down), None while all is well.
    """

    engines: Mapping[str, Serving]
    metrics: Metrics
    media: Media
    config: AppConfig
    started: int = field(default_factory=lambda: int(time.time()))
    unavailable: str | None = None

    def engine(self, model: str) -> Serving:
        """The engine that serves a model name.

        Raises RequestError with the names there are, and EngineClosedError while it cannot be used.
        """
        if self.unavailable is not None:
            raise EngineClosedError(self.unavailable)
        if model not in self.engines:
            served = ", ".join(self.engines)
            raise RequestError(
                f"The model {model!r} is not served here. Served: {served}.", param="model", code="model_not_found"
            )
        engine = self.engines[model]
        health = engine.health()
        if health.state in ("failed", "closed"):
            raise EngineClosedError(f"The engine of {model!r} has stopped: {health.reason or 'it was closed'}.")
        return engine

    async def fetch(self, model: str, pictures: Iterable[tuple[str, str]]) -> Mapping[str, bytes]:
        """Fetch those of the pictures (URLs and places) that are not in the request. Raises as `engine` does, and ImageError."""
        return await self.media.fetch(pictures, most=self.engine(model).config.max_images)

    def failure(self) -> str | None:
        """Why this server is better started anew, or None: an engine has stopped for good, or fails repeatedly."""
        for name, engine in self.engines.items():
            health = engine.health()
            if health.state == "failed" or health.circuit == "open":
                return f"the engine of {name!r} failed: {health.reason}"
        return None

    def trouble(self) -> str | None:
        """Why this server should get no traffic, or None."""
        if self.unavailable is not None:
            return self.unavailable
        for name, engine in self.engines.items():
            health = engine.health()
            if not health.ready:
                state = "stalled" if health.stalled else health.state
                what = "fails repeatedly" if health.circuit == "open" else f"is {state}"
                return f"The engine of {name!r} {what}{f': {health.reason}' if health.reason else ''}."
        return None


def service_of(request: Request) -> Service:
    """The service of the app that a request came to."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def request_id(request: Request) -> str:
    """The id of the HTTP request, as on its answer and in the log."""
    return str(request.state.request_id)


def json_reply(value: msgspec.Struct) -> Response:
    """A whole reply."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def build_app(engines: Mapping[str, Serving], routes: Sequence[BaseRoute], config: AppConfig) -> Starlette:
    """The app that serves `engines`, by served model name, on `routes`."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID],
    )
    app = Starlette(
        routes=list(routes),
        middleware=[
            Middleware(RequestIds),
            *([cors] if config.cors_origins else []),
            Middleware(Failures),
            Middleware(Authentication, keys=config.api_keys),
            Middleware(BodyLimit, most=config.max_body),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    # A path with a slash too many is an unknown path like any other, not a redirect without an error object.
    app.router.redirect_slashes = False
    app.state.service = Service(
        MappingProxyType(dict(engines)),
        Metrics(engines),
        Media(config.allow_media_hosts, most_bytes=config.max_body),
        config,
    )
    return app


def loading_app(config: AppConfig) -> Starlette:
    """The app that answers while the engines load: unhealthy, and 503 on every path."""
    app = build_app({}, [*routes(), *page.routes(), Route("/{path:path}", _loading, methods=["GET", "POST"])], config)
    app.state.service.unavailable = "The model is still loading."
    return app


def routes() -> list[Route]:
    """The routes that every server has."""
    return [
        Route("/health", ready, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/health/decode", decode, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]


def live(request: Request) -> Response:
    """GET /health/live: 200 as long as the process answers, whatever its engines do."""
    return json_reply(Health())


def ready(request: Request) -> Response:
    """GET /health and /health/ready: 200 when requests can be served, else 503."""
    trouble = service_of(request).trouble()
    return unavailable(trouble, "unhealthy").response() if trouble else json_reply(Health())


def decode(request: Request) -> Response:
    """GET /health/decode: as `ready`, and a decode step of every engine succeeded lately or does so now."""
    service = service_of(request)
    if trouble := service.trouble():
        return unavailable(trouble, "unhealthy").response()
    ages = {name: _decoded(name, engine) for name, engine in service.engines.items()}
    return json_reply(DecodeHealth(ages))


def _decoded(name: str, engine: Serving) -> float:
    """Seconds since a decode step succeeded, 0 for one that was run now. Raises EngineUnhealthyError."""
    last = engine.health().last_step
    if last is not None and last < RECENT_SECONDS:
        return round(last, 3)
    try:
        engine.probe(PROBE_SECONDS)
    except EngineError as error:
        raise EngineUnhealthyError(f"The engine of {name!r} does not decode: {error}") from error
    return 0.0


def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus text."""
    return Response(service_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _loading(request: Request) -> Response:
    return unavailable(service_of(request).unavailable or "", "loading").response()


def _http_error(request: Request, error: Exception) -> Response:
    return failure_of(error).response()
