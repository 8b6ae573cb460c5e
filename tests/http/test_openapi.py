"""`/openapi.json`: a valid document of every route, and a server that keeps to it whatever is sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kaminari_core.registry import load_registry
from kaminari_core.testing import TinyModel
from kaminari_http.openapi import OPERATIONS, document
from tests.http.serving import PLUGIN, Running, Start

CONFIGURATION = """
[checks.not_a_server_error]
# A timeout that the request sets itself may be shorter than any reply takes.
expected-statuses = ["2xx", "3xx", "4xx", 504]
"""


def own_routes() -> list[Route]:
    return [route for route in load_registry([PLUGIN]).routes({}) if route.include_in_schema]


def test_is_valid_and_served(echo: Running) -> None:
    made = echo.http.get("/openapi.json").json()
    assert list(OpenAPIV31SpecValidator(made).iter_errors()) == []
    assert made["components"]["schemas"]["ChatRequest"]["properties"]["model"] == {"enum": ["echo"]}
    refused = made["components"]["schemas"]["ResponsesRequest"]["properties"]
    assert (refused["store"]["enum"], refused["max_tokens"]["enum"]) == ([None, False], [None])
    assert "securitySchemes" not in made["components"]


def test_every_route_has_its_types_and_every_type_its_route() -> None:
    assert {(method, route.path) for route in own_routes() for method in route.methods - {"HEAD"}} == set(OPERATIONS)


def test_every_status_has_the_error_object() -> None:
    for path, methods in document(own_routes(), ["m"], keyed=True)["paths"].items():
        for operation in methods.values():
            failures = {status: reply for status, reply in operation["responses"].items() if status != "200"}
            assert failures, path
            for reply in failures.values():
                assert reply["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorReply"}
            assert ("401" in failures) == ("security" in operation)
    assert "401" not in document(own_routes(), ["m"], keyed=False)["paths"]["/generate"]["post"]["responses"]


def test_plugin_routes_are_listed() -> None:
    def hello(request: Any) -> PlainTextResponse:
        """Greets."""
        return PlainTextResponse("hello")

    made = document([Route("/hello/{name:path}", hello)], [], keyed=False)
    assert list(OpenAPIV31SpecValidator(made).iter_errors()) == []
    assert made["paths"]["/hello/{name}"]["get"]["summary"] == "Greets."


@pytest.mark.parametrize("key", [None, "k"])
def test_the_server_keeps_to_it(start: Start, tmp_path: Path, key: str | None) -> None:
    """Thousands of requests, right and wrong by the document: every status, type and body is one that it names."""
    server = start(TinyModel, max_tokens=4, app={"api_keys": (key,) if key else ()})
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    options = ["--no-shrink", "--seed", "1", "--max-examples", "5", "--warnings", "off"]
    if key is None:
        # JSON Schema cannot say that a string is the URL of a picture, so not all that is right by it can be served.
        options += ["--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing"]
    else:
        # The same bodies again would tell nothing new: this is about what is said without the key.
        options += ["--checks", "ignored_auth,status_code_conformance", "--phases", "examples,fuzzing"]
        options += ["--header", f"Authorization: Bearer {key}"]
    command = [str(Path(sys.executable).parent / "st"), "run", f"{server.url}/openapi.json", *options]
    variables = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-6000:]
    server.settle()
