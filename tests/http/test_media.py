"""Pictures by URL: fetched from allowed hosts only, within limits, and never a way into the server's own network."""

from __future__ import annotations

import base64
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kaminari_core.errors import KaminariError
from kaminari_core.testing import TinyModel
from kaminari_http import media
from kaminari_http.config import AppConfig, parse_host
from kaminari_http.media import is_public
from tests.http.serving import Running, Start, picture, picture_message
from tests.http.test_bad_requests import error_of

PNG = base64.b64decode(picture(size=(96, 64)).partition(",")[2])
Answer = Callable[[BaseHTTPRequestHandler], None]


def send(status: int, kind: str = "image/png", body: bytes = PNG, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def drip(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then: each read succeeds, the whole never ends."""
    handler.send_response(200)
    handler.send_header("Content-Type", "image/png")
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b"x")
        time.sleep(0.02)


@contextmanager
def upstream(certificate: Path | None = None, **answers: Answer) -> Iterator[tuple[str, list[str]]]:
    """A web server on loopback, with TLS if there is a certificate: its address, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answers[self.path.strip("/").partition("?")[0]](self)

        def log_message(self, *arguments: Any) -> None:
            pass

        def handle(self) -> None:
            # Some of the tests are about clients that hang up.
            with suppress(ConnectionError):
                super().handle()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def ask(server: Running, url: str, **fields: Any) -> Any:
    return server.post("/generate", {"prompt": "read", "images": [url], "max_tokens": 4, **fields})


def test_a_picture_is_fetched_on_every_route(start: Start) -> None:
    with upstream(cat=send(200), octets=send(200, "application/octet-stream")) as (host, asked):
        server = start(TinyModel, app={"allow_media_hosts": (host,)})
        url = f"http://{host}/cat?size=1"
        expected = ask(server, picture(size=(96, 64))).json()
        assert ask(server, url).json()["text"] == expected["text"]
        assert ask(server, f"http://{host}/octets").json()["saw"] == expected["saw"]
        chat = {"model": "echo", "messages": [picture_message(url)], "max_tokens": 4}
        assert server.post("/v1/chat/completions", chat).json()["kaminari"]["saw"] == expected["saw"]
        item = {
            "role": "user",
            "content": [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "read"}],
        }
        responses = {"model": "echo", "input": [item], "max_output_tokens": 4}
        assert server.post("/v1/responses", responses).json()["kaminari"]["saw"] == expected["saw"]
        assert server.post("/tokenize", {"prompt": "read", "images": [url]}).json()["saw"] == expected["saw"]
    assert asked.count("/cat?size=1") == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (send(404), "answered 404 Not Found"),
        (send(500), "answered 500"),
        (send(204, body=b""), "answered 204"),
        (send(200, "text/html", b"<html>"), "answered with text/html"),
        (send(200, "image/png", b"<html>"), "PNG"),
        (send(200, body=b"x" * 60_000), "larger than 50000 bytes"),
        (lambda handler: handler.wfile.write(b"HELLO\r\n\r\n"), "cannot be read"),
        (lambda handler: None, "cannot be read"),
    ],
    ids="404 500 204 html html-as-png large no-http nothing".split(),
)
def test_what_is_no_picture_is_a_400_and_costs_no_token(
    start: Start, answer: Answer, message: str, stream: bool
) -> None:
    with upstream(x=answer) as (host, _):
        server = start(TinyModel, app={"allow_media_hosts": (host,), "max_body": 50_000})
        body = {"model": "echo", "messages": [picture_message(f"http://{host}/x")], "stream": stream}
        error = error_of(server.post("/v1/chat/completions", body))
        assert error["param"] == "messages[0].content[0]"
        assert message in error["message"]
        assert server.engine.stats().prompt_tokens == 0


def test_slow_hosts_are_left_at_the_deadline(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "SECONDS", 0.3)
    with upstream(drip=drip) as (host, _), socket.create_server(("127.0.0.1", 0)) as silent:
        silent_host = f"127.0.0.1:{silent.getsockname()[1]}"
        server = start(TinyModel, app={"allow_media_hosts": (host, silent_host)})
        for url in (f"http://{host}/drip", f"http://{silent_host}/x"):
            began = time.monotonic()
            assert "within 0.3 s" in error_of(ask(server, url))["message"]
            assert time.monotonic() - began < 3


def test_redirects_stay_on_the_list(start: Start) -> None:
    with upstream(secret=send(200)) as (hidden, hidden_asked):
        answers = {
            "near": send(302, Location="/cat"),
            "far": send(302, Location=f"http://{hidden}/secret"),
            "local": send(302, Location="http://localhost/x"),
            "file": send(302, Location="file:///etc/passwd"),
            "loop": send(302, Location="/loop"),
            "lost": send(302),
            "cat": send(200),
        }
        with upstream(**answers) as (host, asked):
            server = start(TinyModel, app={"allow_media_hosts": (host,)})
            assert ask(server, f"http://{host}/near").status_code == 200
            assert asked == ["/near", "/cat"]
            for path in ("far", "local"):
                assert error_of(ask(server, f"http://{host}/{path}"))["code"] == "media_host_not_allowed"
            assert "http: or https:" in error_of(ask(server, f"http://{host}/file"))["message"]
            for path in ("loop", "lost"):
                assert "more than 3 times" in error_of(ask(server, f"http://{host}/{path}"))["message"]
    assert hidden_asked == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
def test_certificates_are_checked(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def certificate(address: str) -> Path:
        made = tmp_path / f"{address}.pem"
        names = ["-subj", "/CN=test", "-addext", f"subjectAltName=IP:{address}"]
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
        ]
        subprocess.run(
            [*command, *names, "-keyout", made, "-out", tmp_path / "public"], check=True, capture_output=True
        )
        made.write_text(made.read_text() + (tmp_path / "public").read_text())
        return made

    right, other = certificate("127.0.0.1"), certificate("127.0.0.2")
    with upstream(right, x=send(200)) as (host, _), upstream(other, x=send(200)) as (impostor, asked):
        server = start(TinyModel, app={"allow_media_hosts": (host, impostor)})
        assert "certificate" in error_of(ask(server, f"https://{host}/x"))["message"]
        monkeypatch.setenv("SSL_CERT_FILE", str(right))
        assert ask(server, f"https://{host}/x").status_code == 200
        # Trusted, but of another address.
        monkeypatch.setenv("SSL_CERT_FILE", str(other))
        assert "certificate" in error_of(ask(server, f"https://{impostor}/x"))["message"]
    assert asked == []


@pytest.mark.parametrize(
    "url",
    [
        "http://{host}@other.example/x",
        "http://user:key@{host}/x",
        "http://127.0.0.1/x",
        "http://127.0.0.1:1/x",
        "http://2130706433:{port}/x",
        "http://0x7f.1:{port}/x",
        "http://[::ffff:127.0.0.1]:{port}/x",
        "http://localhost:{port}/x",
        "http://{host}.example.org/x",
        "http://{host}\\@other.example/x",
        "http://{host} /x",
        "http://\uff11\uff12\uff17.0.0.1:{port}/x",
        "https:///x",
        "http://[::1/x",
        "HTTP://other.example/x",
    ],
)
def test_other_places_are_refused_before_anything_is_asked(start: Start, url: str) -> None:
    with upstream(x=send(200)) as (host, asked):
        server = start(TinyModel, app={"allow_media_hosts": (host,)})
        error = error_of(ask(server, url.format(host=host, port=host.partition(":")[2])))
        assert (error["param"], error["type"]) == ("images[0]", "invalid_request_error")
    assert asked == []


def test_a_name_with_a_private_address_is_refused_although_it_is_on_the_list(start: Start) -> None:
    with upstream(x=send(200)) as (host, asked):
        port = host.partition(":")[2]
        server = start(TinyModel, app={"allow_media_hosts": (f"localhost:{port}",)})
        error = error_of(ask(server, f"http://localhost:{port}/x"))
        assert (error["code"], "not public" in error["message"]) == ("media_host_not_allowed", True)
    assert asked == []


def test_nothing_is_fetched_unless_a_host_is_allowed(tiny: Running) -> None:
    with upstream(x=send(200)) as (host, asked):
        assert "only data: URLs" in error_of(ask(tiny, f"http://{host}/x"))["message"]
    assert asked == []


def test_not_more_pictures_than_a_request_may_have(start: Start) -> None:
    with upstream(x=send(200)) as (host, asked):
        server = start(TinyModel, max_images=2, app={"allow_media_hosts": (host,)})
        urls = [f"http://{host}/x?{number}" for number in range(3)]
        assert error_of(server.post("/generate", {"prompt": "x", "images": urls}))["code"] == "too_many_images"
    assert asked == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("64:ff9b::5db8:d822", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("192.168.1.1", False), ("172.16.0.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False),
        ("::1", False), ("::", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("ff02::1", False), ("::ffff:127.0.0.1", False), ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("2002:a00:1::1", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    ("entry", "parsed"),
    [
        ("Example.ORG", ("example.org", None)),
        ("a.b:8080", ("a.b", 8080)),
        ("[::1]:80", ("::1", 80)),
        ("10.0.0.1", ("10.0.0.1", None)),
    ],
)
def test_hosts_on_the_list(entry: str, parsed: tuple[str, int | None]) -> None:
    assert parse_host(entry) == parsed


@pytest.mark.parametrize("entry", ["", "http://a.b", "a.b/c", "*.a.b", "u@a.b", "a.b:x", "[::1", ":80"])
def test_hosts_that_are_none(entry: str) -> None:
    with pytest.raises(KaminariError, match="--allow-media-host"):
        AppConfig(allow_media_hosts=(entry,))
