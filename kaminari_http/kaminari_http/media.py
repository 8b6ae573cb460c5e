"""Fetching pictures from hosts that the server's owner allowed, and from nowhere else.

A server that fetches what strangers name can be made to read what only it can reach. So a host must be on the list, with its
port; the name is resolved once, every address of it must be public, and the connection goes to the address that was checked, so
that a second answer of the name server changes nothing. An address that the owner listed literally (`127.0.0.1:8080`) may be
private: nobody else can make that name mean another machine. Redirects are followed within the list only, and size and time are
bounded.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio.to_thread
from anyio import CapacityLimiter

from kaminari_core.errors import ImageError, RequestError
from kaminari_http.config import parse_host

SECONDS = 10.0
"""How long one picture may take, redirects included."""
REDIRECTS = 3
FETCHES = 8
"""Pictures that are fetched at a time."""
PORTS = {"http": 80, "https": 443}
FILES = frozenset({"application/octet-stream", "binary/octet-stream", "application/pdf"})
"""Media types that are taken beside those of pictures."""
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for IPv4 ones (RFC 6052), private ones too."""


class Media:
    """Fetches pictures from `hosts` (`HOST` or `HOST:PORT`), of at most `most_bytes` each."""

    def __init__(self, hosts: Sequence[str], *, most_bytes: int) -> None:
        self._hosts = frozenset(parse_host(entry) for entry in hosts)
        self._most_bytes = most_bytes
        self._limiter = CapacityLimiter(FETCHES)

    async def fetch(self, pictures: Iterable[tuple[str, str]], *, most: int) -> Mapping[str, bytes]:
        """The files behind those of the URLs that begin with http(s), by URL; `pictures` are URLs and their places.

        Where no host is allowed nothing is fetched, and the URLs are refused by whoever decodes them. Raises ImageError with
        the place as `param`, RequestError for more than `most` pictures.
        """
        wanted = {url: place for url, place in pictures if url.lower().startswith(("http://", "https://"))}
        if not self._hosts or not wanted:
            return {}
        if len(wanted) > most:
            raise RequestError(
                f"There are {len(wanted)} pictures to fetch, but the limit is {most} (--max-images).",
                code="too_many_images",
            )
        getting = [partial(self._get, url, place) for url, place in wanted.items()]
        files = await asyncio.gather(*(anyio.to_thread.run_sync(get, limiter=self._limiter) for get in getting))
        return dict(zip(wanted, files, strict=True))

    def _get(self, url: str, place: str) -> bytes:
        deadline = time.monotonic() + SECONDS
        for _ in range(REDIRECTS + 1):
            target = self._target(url, place)
            try:
                with _answer(target, deadline) as answer:
                    if answer.status not in (301, 302, 303, 307, 308):
                        file = self._file(answer, target, place)
                        if time.monotonic() >= deadline:
                            # Where no length was declared, a connection that was cut looks like the end of the file.
                            raise TimeoutError
                        return file
                    url = urljoin(target.url.geturl(), answer.getheader("Location", ""))
            except (OSError, http.client.HTTPException) as error:
                late = time.monotonic() >= deadline
                what = (
                    f"did not send it within {SECONDS:g} s"
                    if late
                    else f"cannot be read: {str(error) or type(error).__name__}"
                )
                raise _refused(place, f"{target.host} {what}") from error
        raise _refused(place, f"the URL is redirected more than {REDIRECTS} times")

    def _target(self, url: str, place: str) -> _Target:
        """Where a URL leads to, after all checks."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
        except ValueError as error:
            raise _refused(place, f"the URL cannot be read: {error}") from None
        if (
            parts.scheme not in PORTS
            or not url.isascii()
            or not url.isprintable()
            or " " in url
            or parts.username is not None
        ):
            raise _refused(place, "the URL must be plain http: or https:, in ASCII, without a user name")
        usual = port == PORTS[parts.scheme]
        if (host, port) not in self._hosts and not ((host, None) in self._hosts and usual):
            raise _refused(
                place, f"pictures are not fetched from {host}:{port} (--allow-media-host)", "media_host_not_allowed"
            )
        return _Target(parts, host, _address(host, port, place))

    def _file(self, answer: http.client.HTTPResponse, target: _Target, place: str) -> bytes:
        if answer.status != 200:
            raise _refused(place, f"{target.host} answered {answer.status} {answer.reason}".rstrip())
        kind = answer.getheader("Content-Type", "").partition(";")[0].strip().lower()
        if kind and not kind.startswith("image/") and kind not in FILES:
            raise _refused(place, f"{target.host} answered with {kind}, which is neither a picture nor a PDF file")
        data = answer.read(self._most_bytes + 1)
        if len(data) > self._most_bytes:
            raise _refused(place, f"the picture is larger than {self._most_bytes} bytes (--max-body)")
        return data


@dataclass(frozen=True, slots=True)
class _Target:
    """A checked URL, and the one address that it is read from."""

    url: SplitResult
    host: str
    address: tuple[str, int]


class _Connection(http.client.HTTPConnection):
    """A connection to the address that was checked, whatever the name means by now."""

    def __init__(self, target: _Target, timeout: float) -> None:
        super().__init__(target.url.netloc, timeout=timeout)
        self._target, self._seconds = target, timeout
        self._connected: socket.socket | None = None

    def connect(self) -> None:
        """Connect, with TLS for https, whose certificate must be of the host's name."""
        self.sock = socket.create_connection(self._target.address, self._seconds)
        if self._target.url.scheme == "https":
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self._target.host)
        self._connected = self.sock

    def hang_up(self) -> None:
        """End it from another thread, whatever it waits for."""
        # Not `self.sock`: that is given up before the body is read when the answer ends with the connection.
        if self._connected is not None:
            # An error means that it has ended already.
            with suppress(OSError):
                self._connected.shutdown(socket.SHUT_RDWR)


@contextmanager
def _answer(target: _Target, deadline: float) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET. At the deadline the connection is closed, however slowly bytes still trickle."""
    seconds = max(0.01, deadline - time.monotonic())
    connection = _Connection(target, seconds)
    timer = threading.Timer(seconds, connection.hang_up)
    timer.daemon = True
    timer.start()
    try:
        path = target.url._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "kaminari"})
        # The response is closed too: it keeps the socket open by itself.
        with connection.getresponse() as answer:
            yield answer
    finally:
        timer.cancel()
        connection.close()


def _address(host: str, port: int, place: str) -> tuple[str, int]:
    """The address of a host. Raises ImageError when a name means one that is not public."""
    try:
        ipaddress.ip_address(host)
        return host, port
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _refused(place, f"{host} cannot be found: {error.strerror}") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not all(map(is_public, addresses)):
        raise _refused(place, f"{host} has an address that is not public", "media_host_not_allowed")
    return addresses[0], port


def is_public(address: str) -> bool:
    """Whether an address is reachable for everybody, and so no way into a network of one's own."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed in TRANSLATED:
            parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        else:
            parsed = parsed.ipv4_mapped or parsed.sixtofour or parsed
    return parsed.is_global and not parsed.is_multicast


def _refused(place: str, reason: str, code: str = "media_fetch_failed") -> ImageError:
    return ImageError(f"{place}: {reason}", param=place, code=code)
