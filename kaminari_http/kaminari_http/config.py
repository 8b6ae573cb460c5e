"""How an app behaves towards its clients: one frozen value, without effects."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kaminari_core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """Who may call, and how much they may send. Command-line flags have the same names with dashes, lists in the singular."""

    api_keys: tuple[str, ...] = ()
    """Bearer tokens that are let in; none lets everybody in."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server; `*` is any."""
    max_body: int = 64 * 2**20
    """Bytes of one request body; pictures travel in it, a third larger than their files. Also of one fetched picture."""
    max_pages: int = 100
    """Pages of one document that a request may have read."""
    allow_media_hosts: tuple[str, ...] = ()
    """Hosts, with a port where it is not the usual one, that pictures are fetched from; none fetches nothing."""

    def __post_init__(self) -> None:
        if any(not key or not key.isprintable() or " " in key for key in self.api_keys):
            # The key itself is a secret, so the message does not show it.
            raise UsageError("an --api-key is empty or holds a space, so no client can send it")
        for entry in self.allow_media_hosts:
            parse_host(entry)
        for name in ("max_body", "max_pages"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', '-')} is {getattr(self, name)}, but must be at least 1")


def parse_host(entry: str) -> tuple[str, int | None]:
    """The host, in lower case, and the port of `HOST` or `HOST:PORT`. Raises UsageError."""
    try:
        parts = urlsplit(f"//{entry}")
        host, port, rest = parts.hostname, parts.port, entry != parts.netloc
    except ValueError:
        host, port, rest = None, None, True
    if not host or rest or "@" in entry or "*" in entry:
        raise UsageError(
            f"--allow-media-host {entry!r} is no host; give a name or an address, with :PORT unless it is 80 or 443"
        )
    return host, port
