"""uvicorn in a thread of its own.

So the main thread stays free to load a model while the socket already answers, and to be interrupted by a signal in either phase;
tests start real servers the same way.
"""

from __future__ import annotations

import socket
import threading
import time
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from kaminari_core.errors import UsageError

CLOSE_SECONDS = 5
"""How long connections may take to end once nothing is generated any more."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises UsageError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol named, unlike in socket.create_server: asyncio sets TCP_NODELAY by it, and without that every
        # answer waits for the client's delayed acknowledgement, 40 ms on Linux.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def _unusable(host: str, port: int, error: OSError) -> UsageError:
    return UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port")


class Server:
    """Serves `app`, which may be exchanged at any time, on a socket, from `__enter__` to `__exit__`."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self.app = app
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            self._call,
            interface="asgi3",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="http", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the server, up to `timeout` seconds, and return whether it has ended.

        It does not end by itself; a signal's exception ends the wait.
        """
        # Not Thread.join: Python 3.11 takes a thread for ended when joining it is interrupted, and the last join would not wait.
        return self._ended.wait(timeout)

    def _run(self, listener: socket.socket) -> None:
        try:
            self._server.run([listener])
        finally:
            self._ended.set()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
