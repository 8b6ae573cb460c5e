"""Clients that ask one question and note when each piece of the answer came.

The one for a server speaks OpenAI's chat completions over the standard library's HTTP, streaming, so that any server can be
measured without installing anything.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from kaminari_core.errors import KaminariError, UsageError


class ServerError(KaminariError):
    """A server that is measured did not answer as it should."""


@dataclass(slots=True)
class Answer:
    """What one client saw: `asked` and `times` are time.monotonic() of the question and of every piece of text; `tokens` is what
    the other side says it generated, and where it says nothing the number of pieces.
    """

    asked: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int | None = None


class Client(Protocol):
    """Asks the same question again and again; used by several threads at once."""

    def ask(self, number: int) -> Answer:
        """Ask question `number` and wait for the end of the answer. Raises KaminariError."""
        ...


class ServerClient:
    """A client of `URL/chat/completions`; `url` ends where `/v1` ends or above it.

    `extra` is added to every request, for what servers have beside OpenAI's fields, such as `{"ignore_eos": true}`.
    """

    def __init__(
        self,
        url: str,
        prompt: str,
        new_tokens: int,
        *,
        key: str | None = None,
        model: str | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url is {url!r}; give where the server is, such as http://127.0.0.1:8000/v1")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout = timeout
        self._prompt, self._new_tokens, self._extra = prompt, new_tokens, dict(extra or {})
        self.model = model or self._first_model()

    def ask(self, number: int) -> Answer:
        """See Client. Questions differ in their first word, so that no server answers from a cache of prompts."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"{number} {self._prompt}"}],
            "max_tokens": self._new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        answer = Answer(time.monotonic())
        with closing(self._connect()) as connection:
            for event in events(self._send(connection, "POST", "/chat/completions", json.dumps(body))):
                self._note(answer, event)
        answer.ended = time.monotonic()
        if not answer.times:
            raise ServerError("the server ended an answer without any text; some drop one client for the next one")
        answer.tokens = answer.tokens or len(answer.times)
        return answer

    def _note(self, answer: Answer, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ServerError(f"the server failed while it answered: {event['error']}")
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            # A token may have no text of its own, which some servers send as an empty piece; with a role it is only a beginning.
            if delta.get("content") or (delta.get("content") == "" and "role" not in delta):
                answer.times.append(time.monotonic())
        if usage := event.get("usage"):
            answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]

    def _first_model(self) -> str:
        with closing(self._connect()) as connection:
            listed = json.loads(self._send(connection, "GET", "/models").read())
        models = [entry["id"] for entry in listed.get("data", ())]
        if not models:
            raise ServerError("the server lists no model; name one with --model-name")
        return str(models[0])

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            where = f"{self._host}:{connection.port}"
            raise ServerError(f"the server at {where} does not answer: {str(error) or type(error).__name__}") from error
        if response.status != 200:
            said = response.read(500).decode("utf-8", "replace")
            raise ServerError(f"the server answered {method} {self._path}{path} with {response.status}: {said}")
        return response


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` line of an event stream, up to `[DONE]`.

    Of the format (https://html.spec.whatwg.org/multipage/server-sent-events.html) this is the part that the API uses: one line of
    data per event, comments between them.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
