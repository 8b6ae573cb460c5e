"""What `kaminari bench --url` does: any OpenAI-compatible server under the traffic of several clients."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from kaminari_core.errors import UsageError
from kaminari_core.progress import terminal_progress

PROMPT_TOKENS, NEW_TOKENS = 128, 64
"""The workload unless one is given."""
REQUESTS = 2
"""Requests of each client in a round."""
WORD = "fox "
"""About one token of every tokenizer."""


def bench_url(
    url: str,
    clients: Sequence[int],
    *,
    key: str | None,
    model: str | None,
    prompt: str | None,
    prompt_tokens: int | None,
    new_tokens: int | None,
    extra: str | None,
    rounds: int,
    out: str | None,
) -> None:
    """Measure a server and show what its clients saw. Raises KaminariError."""
    from kaminari_core.traffic.clients import ServerClient
    from kaminari_core.traffic.drive import levels, report, table

    text = prompt or WORD * (prompt_tokens or PROMPT_TOKENS)
    client = ServerClient(url, text, new_tokens or NEW_TOKENS, key=key, model=model, extra=_fields(extra))
    with terminal_progress() as progress:
        found = levels(client, clients, REQUESTS, rounds, progress)
    click.echo(table(found))
    if out:
        settings = {"new_tokens": new_tokens or NEW_TOKENS, "rounds": rounds, "requests_per_client": REQUESTS}
        written = {
            # Not the key.
            "command": shlex.join(["kaminari", *(word for word in sys.argv[1:] if word != key)]),
            "date": time.strftime("%Y-%m-%d"),
            "server": {"url": url, "model": client.model},
            "settings": settings,
            "levels": report(found),
        }
        Path(out).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _fields(extra: str | None) -> dict[str, object]:
    if extra is None:
        return {}
    try:
        found = json.loads(extra)
    except ValueError as error:
        raise UsageError(f"--body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError("--body must be a JSON object, such as '{\"ignore_eos\": true}'")
    return found
