"""Keys, request ids, limits on bodies, CORS, crashes: what holds on every path, whatever the route does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kaminari_core.testing import EchoModel
from kaminari_http.app import build_app, routes
from kaminari_http.config import AppConfig
from kaminari_http.server import Server, listen
from tests.http.serving import Running, Start, chat_body, open_engine, raw_connection, running
from tests.http.test_lifecycle import wait_until

PATHS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/echo"),
    ("GET", "/metrics"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/generate"),
    ("POST", "/generate_stream"),
    ("GET", "/no/such/path"),
    ("GET", "//health"),
    ("GET", "/health/"),
]


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(open_engine(EchoModel), api_keys=("first", "se/cond=", "kl\u00fcsel")) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_path_asks_for_a_key(locked: Running, method: str, path: str) -> None:
    for sent in (None, "", "first", "Bearer", "Bearer firs", "Bearer first2", "Basic first", "Bearer first second"):
        headers = {} if sent is None else {"Authorization": sent}
        reply = locked.http.request(method, httpx2.URL(locked.url + path), headers=headers)
        assert reply.status_code == 401, sent
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["type"] == "authentication_error"


def test_keys_that_are_known(locked: Running) -> None:
    for key in ("first", "se/cond="):
        assert locked.openai(api_key=key).models.list().data
    for header in ("bearer first", "BEARER  first", "Bearer kl\u00fcsel"):
        assert locked.http.get("/v1/models", headers={b"Authorization": header.encode()}).status_code == 200


def test_health_needs_no_key(locked: Running) -> None:
    assert locked.http.get("/health").json() == {"status": "ok"}
    assert locked.http.head("/health").status_code == 200


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n"])
def test_keys_that_no_client_could_send(key: str) -> None:
    with pytest.raises(Exception, match="--api-key"):
        AppConfig(api_keys=(key,))


@pytest.mark.parametrize("given", ["abc-123", "A" * 128, "trace:00/1+2=._@"])
def test_sane_request_ids_are_taken(echo: Running, given: str) -> None:
    for path in ("/health", "/nowhere"):
        assert echo.http.get(path, headers={"X-Request-Id": given}).headers["x-request-id"] == given
    reply = echo.post("/generate", {"prompt": "x"}, headers={"X-Request-Id": given})
    assert reply.json()["request_id"] == given


@pytest.mark.parametrize("given", ["", "a b", "A" * 129, "x\ty", "<script>", "\u00fc", "a,b"])
def test_other_request_ids_are_replaced(echo: Running, given: str) -> None:
    made = echo.http.get("/health", headers={b"X-Request-Id": given.encode()}).headers["x-request-id"]
    assert made != given
    assert len(made) == 32


def test_one_request_id_may_be_used_twice_at_once(echo: Running) -> None:
    headers = {"X-Request-Id": "same"}
    assert echo.chat("hi", n=2).status_code == 200
    assert [echo.post("/generate", {"prompt": "x"}, headers=headers).status_code for _ in range(3)] == [200] * 3


def test_request_ids_are_in_the_log(echo: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kaminari_http"):
        echo.post("/generate", {"prompt": "x"}, headers={"X-Request-Id": "find-me"})
        echo.http.get("/a%0Aforged%20line", headers={"X-Request-Id": "find-me-too"})
        # A line is written when its answer is out.
        wait_until(lambda: "find-me-too" in caplog.text)
    lines = [record.getMessage() for record in caplog.records]
    assert any("find-me" in line and "end_token" in line for line in lines)
    assert any("find-me-too" in line and "404" in line for line in lines)
    assert not any("\n" in line for line in lines)


class TestBodyLimit:
    """1,000 bytes are allowed."""

    @pytest.fixture
    def small(self, start: Start) -> Running:
        return start(EchoModel, app={"max_body": 1000})

    @staticmethod
    def body(size: int) -> bytes:
        frame = json.dumps({"prompt": ""}).encode()
        return frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]

    def check(self, reply: httpx2.Response) -> None:
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"
        assert "1000 bytes" in reply.json()["error"]["message"]
        assert reply.headers["x-request-id"] == "big"

    @pytest.mark.parametrize("size", [1001, 500_000, 3_000_000])
    def test_declared(self, small: Running, size: int) -> None:
        headers = {"X-Request-Id": "big", "Content-Type": "application/json"}
        self.check(small.http.post("/generate", content=self.body(size)[:size], headers=headers))

    @pytest.mark.parametrize("size", [1001, 100_000])
    def test_chunked(self, small: Running, size: int) -> None:
        def chunks() -> Iterator[bytes]:
            body = self.body(size)
            for start in range(0, len(body), 400):
                yield body[start : start + 400]

        headers = {"X-Request-Id": "big", "Content-Type": "application/json"}
        self.check(small.http.post("/generate", content=chunks(), headers=headers))

    def test_exactly_at_the_limit(self, small: Running) -> None:
        headers = {"Content-Type": "application/json"}
        for content in (self.body(1000), iter([self.body(1000)])):
            # The prompt is longer than the engine's context: the body was read, and 400 is about what it says.
            reply = small.http.post("/generate", content=content, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")

    def test_client_that_asks_first_is_told_not_to_send(self, small: Running) -> None:
        with raw_connection(small.url) as client:
            head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\nExpect: 100-continue\r\n\r\n"
            client.sendall(head.encode())
            assert client.recv(100).split()[1] == b"413"

    @pytest.mark.parametrize("length", [b"-1", b"1e3", b"9" * 40])
    def test_absurd_lengths(self, small: Running, length: bytes) -> None:
        with raw_connection(small.url) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n{}")
            client.shutdown(1)
            assert client.recv(100).split()[1] in (b"400", b"413")
        assert small.http.get("/health").status_code == 200


PREFLIGHT = {
    "Origin": "https://a.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


class TestCrossOrigin:
    def test_off_by_default(self, echo: Running) -> None:
        assert (
            "access-control-allow-origin"
            not in echo.http.get("/health", headers={"Origin": "https://a.example"}).headers
        )
        preflight = echo.http.options("/generate", headers=PREFLIGHT)
        assert "access-control-allow-origin" not in preflight.headers
        assert preflight.status_code == 405

    def test_allowed_origins(self, start: Start) -> None:
        server = start(EchoModel, app={"cors_origins": ("https://a.example",), "api_keys": ("k",)})
        preflight = server.http.options("/generate", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        refused = server.post("/generate", {"prompt": "x"}, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in refused.headers
        other = server.http.options("/generate", headers={**PREFLIGHT, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.fixture(scope="module")
def crashing() -> Iterator[str]:
    """The address of a server with a plugin's routes that crash."""

    def crash(request: Request) -> Any:
        raise ZeroDivisionError("secret detail")

    async def plain(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await request.body())

    own = [Route("/crash", crash), Route("/plain", plain, methods=["POST"])]
    app = build_app({}, [*routes(), *own], AppConfig(max_body=100, api_keys=("k",)))
    with listen("127.0.0.1", 0) as listener, Server(app, listener) as server:
        yield server.url


def test_a_crash_is_a_500_that_tells_nothing(crashing: str, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Authorization": "Bearer k", "X-Request-Id": "crash-1"}
    reply = httpx2.get(f"{crashing}/crash", headers=headers)
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"] == "crash-1"
    assert any(record.exc_info and "crash-1" in record.getMessage() for record in caplog.records)


def test_routes_of_plugins_are_covered(crashing: str) -> None:
    assert httpx2.post(f"{crashing}/plain", content=b"x").status_code == 401
    headers = {"Authorization": "Bearer k"}
    assert httpx2.post(f"{crashing}/plain", content=b"x", headers=headers).text == "x"
    assert httpx2.post(f"{crashing}/plain", content=b"x" * 101, headers=headers).status_code == 413


def test_requests_survive_each_other_on_one_connection(echo: Running) -> None:
    with httpx2.Client(base_url=echo.url) as client:
        for _ in range(3):
            assert client.post("/generate", content=b"{").status_code == 400
            assert client.post("/v1/chat/completions", json=chat_body("hi")).status_code == 200
            assert client.get("/nowhere").status_code == 404
