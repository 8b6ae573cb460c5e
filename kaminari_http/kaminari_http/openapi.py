"""`/openapi.json`: what this server takes and answers, made from the wire types and the routes that it really has.

`OPERATIONS` says which types belong to a route; a plugin's route, of which nothing is known, is listed by its docstring. The
names in `model` are those that are served.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kaminari_http.app import DecodeHealth, Health, service_of
from kaminari_http.errors import ErrorReply
from kaminari_http.middleware import OPEN_PATHS, REQUEST_ID
from kaminari_http.unsupported import CHAT, COMPLETIONS, RESPONSES, Harmless
from kaminari_http.wire import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    GenerateReply,
    GenerateRequest,
    ModelCard,
    ModelList,
    TokenEvent,
    TokenizeReply,
)
from kaminari_http.wire_completions import Completion, CompletionRequest
from kaminari_http.wire_ocr import OcrForm, OcrPage, OcrReply, OcrRequest, OcrSummary
from kaminari_http.wire_responses import ResponseEvent, ResponseObject, ResponsesRequest

JSON, FORM, EVENTS, TEXT = "application/json", "multipart/form-data", "text/event-stream", "text/plain"
SCHEMA = "#/components/schemas/{name}"
REFUSALS = (400, 404, 405, 413, 415, 429, 500, 503, 504)
"""What a route that serves requests may answer instead, beside 401."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route takes and answers: msgspec types, or a media type where the answer is no JSON."""

    reply: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    events: tuple[type[msgspec.Struct], ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = (405, 500, 503)
    form: type[msgspec.Struct] | None = None


_TURN = {"role": "user", "content": "What does the picture say?"}
_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAALElEQVR4nO3MoQEAAAjDMOD/n+GIGUTqm97KmvAHAAA"
    "AAAAAAAAAAAAAAAAA8B44UC0Bf7Sd28IAAAAASUVORK5CYII="
)
OPERATIONS: Mapping[tuple[str, str], Operation] = MappingProxyType(
    {
        ("GET", "/"): Operation("text/html"),
        ("GET", "/health"): Operation(Health),
        ("GET", "/health/live"): Operation(Health, errors=(405, 500)),
        ("GET", "/health/ready"): Operation(Health),
        ("GET", "/health/decode"): Operation(DecodeHealth),
        ("GET", "/metrics"): Operation(TEXT),
        ("GET", "/openapi.json"): Operation(JSON),
        ("GET", "/v1/models"): Operation(ModelList),
        ("GET", "/v1/models/{model:path}"): Operation(ModelCard, errors=(404, 405, 500, 503)),
        ("POST", "/v1/chat/completions"): Operation(
            ChatCompletion, ChatRequest, (ChatChunk,), {"messages": [_TURN], "max_tokens": 16}, REFUSALS
        ),
        ("POST", "/v1/completions"): Operation(
            Completion, CompletionRequest, (Completion,), {"prompt": "Hello", "max_tokens": 16}, REFUSALS
        ),
        ("POST", "/v1/responses"): Operation(
            ResponseObject, ResponsesRequest, (ResponseEvent,), {"input": "Hello", "max_output_tokens": 16}, REFUSALS
        ),
        ("POST", "/v1/ocr"): Operation(
            OcrReply, OcrRequest, (OcrPage, OcrSummary), {"file": _PICTURE, "max_tokens": 16}, (*REFUSALS, 403), OcrForm
        ),
        ("POST", "/generate"): Operation(
            GenerateReply, GenerateRequest, (), {"prompt": "Hello", "max_tokens": 16}, REFUSALS
        ),
        ("POST", "/generate_stream"): Operation(
            EVENTS, GenerateRequest, (TokenEvent, GenerateReply), {"prompt": "Hello", "max_tokens": 16}, REFUSALS
        ),
        ("POST", "/tokenize"): Operation(TokenizeReply, GenerateRequest, (), {"prompt": "Hello"}, REFUSALS),
    }
)
NOT_SUPPORTED: Mapping[str, Harmless] = MappingProxyType(
    {"ChatRequest": CHAT, "CompletionRequest": COMPLETIONS, "ResponsesRequest": RESPONSES}
)


def routes() -> list[Route]:
    """The route of the document."""
    return [Route("/openapi.json", openapi, methods=["GET"])]


def openapi(request: Request) -> Response:
    """GET /openapi.json: this server as an OpenAPI 3.1 document."""
    service = service_of(request)
    found = [route for route in request.app.routes if isinstance(route, Route) and route.include_in_schema]
    made = document(found, list(service.engines), keyed=bool(service.config.api_keys))
    return Response(msgspec.json.encode(made), media_type=JSON)


def document(routes: Iterable[Route], models: list[str], *, keyed: bool) -> dict[str, Any]:
    """The document for these routes, served model names, and whether a key is asked for."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = re.sub(r":\w+}", "}", route.path)
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, models, keyed=keyed)
    components: dict[str, Any] = {
        "schemas": _schemas(models),
        "headers": {REQUEST_ID: {"description": "The request's id, as in the log.", "schema": {"type": "string"}}},
    }
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kaminari",
            "version": version("kaminari-http"),
            "description": "Vision-language models over HTTP. Every failure has the one object `ErrorReply`.",
        },
        "paths": paths,
        "components": components,
    }


def _operation(route: Route, method: str, models: list[str], *, keyed: bool) -> dict[str, Any]:
    known = OPERATIONS.get((method, route.path))
    summary = inspect.getdoc(route.endpoint) or route.name
    made: dict[str, Any] = {
        "summary": summary.partition("\n\n")[0].removeprefix(f"{method} {route.path}: ").replace("\n", " "),
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path.lower()).strip('_')}",
        "responses": {},
    }
    parameters = re.findall(r"{(\w+)", route.path)
    if parameters:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "enum": models}}
            if known
            else {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    locked = keyed and route.path not in OPEN_PATHS
    if locked:
        made["security"] = [{"key": []}]
    if known is None:
        made["responses"] = {"default": {"description": "What the plugin that brings this route answers."}}
        return made
    if known.body is not None:
        example = {"model": models[0], **known.example} if models else dict(known.example)
        content = {JSON: {"schema": _reference(known.body), "example": example}}
        if known.form is not None:
            content[FORM] = {"schema": _reference(known.form)}
        made["requestBody"] = {"required": True, "content": content}
    made["responses"]["200"] = _answer("The reply", _contents(known))
    errors = (*known.errors, 401) if locked else known.errors
    for status in sorted(errors):
        failure = _answer(HTTPStatus(status).phrase, {JSON: {"schema": _reference(ErrorReply)}})
        made["responses"][str(status)] = failure
    return made


def _answer(description: str, content: Mapping[str, Any]) -> dict[str, Any]:
    headers = {REQUEST_ID: {"$ref": f"#/components/headers/{REQUEST_ID}"}}
    return {"description": description, "headers": headers, "content": content}


def _contents(operation: Operation) -> dict[str, Any]:
    """The media types of a reply. For a stream the schema is that of one event; OpenAPI 3.1 cannot say what its data hold."""
    contents: dict[str, Any] = {}
    if not isinstance(operation.reply, str):
        contents[JSON] = {"schema": _reference(operation.reply)}
    elif operation.reply != EVENTS:
        contents[operation.reply] = {"schema": {"type": "object" if operation.reply == JSON else "string"}}
    if operation.events:
        names = " or ".join(kind.__name__ for kind in operation.events)
        data = {"type": "string", "description": f"JSON: {names}, or ErrorReply as the last; or `[DONE]`."}
        event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
        contents[EVENTS] = {"schema": event}
    return contents


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": SCHEMA.format(name=kind.__name__)}


def _schemas(models: list[str]) -> dict[str, Any]:
    """Every type that travels, the bodies with the served names and the keys that are refused."""
    kinds: set[type[msgspec.Struct]] = {ErrorReply}
    for operation in OPERATIONS.values():
        known = (operation.reply, operation.body, operation.form, *operation.events)
        kinds |= {kind for kind in known if isinstance(kind, type)}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=SCHEMA)
    schemas["OcrForm"]["properties"]["file"] = {"type": "string", "format": "binary"}
    for name, schema in schemas.items():
        if name.endswith(("Request", "Form")) and models:
            required = "model" in schema["required"] if "required" in schema else False
            schema["properties"]["model"] = {"enum": models if required else [*models, None]}
        for key, values in NOT_SUPPORTED.get(name, {}).items():
            schema["properties"][key] = {
                "enum": [None, *values],
                "description": "Not supported; other values are refused.",
            }
    return schemas
