"""Errors for the people who use kaminari.

One root, few children: a front end chooses its status code or exit code by class, and shows the message as it is. A message
says what happened, what there is, and what to do. Broken invariants inside the engine are plain assertions instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kaminari_core.flow import Saw


class KaminariError(Exception):
    """Root of every error that a user is meant to read. `code` is a stable machine-readable word, None where there is none."""

    code: str | None = None


class UsageError(KaminariError):
    """A command-line option or a configuration value that cannot be used."""


class UnknownNameError(UsageError):
    """A model, cache, scheduler or quantizer name that no plugin offers."""


class PluginError(KaminariError):
    """A plugin that breaks the contract, such as two specs of one name."""


class CheckpointError(KaminariError):
    """A checkpoint directory whose files are missing, damaged or not what the model needs."""


class RequestError(KaminariError):
    """A request that can never be served as it was sent.

    `param` names the offending field in the sender's terms (`messages[0].content[1]`), `code` is a stable machine-readable
    word such as `context_length_exceeded`; both may be None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments are lost by the default pickling of exceptions, and errors cross process borders.
        return (_rebuild_request_error, (type(self), str(self), self.param, self.code))


class PromptTooLongError(RequestError):
    """A prompt that the context cannot hold: it has `tokens` tokens, and `saw` tells those of its pictures."""

    def __init__(self, message: str, tokens: int, saw: Sequence[Saw] = (), *, param: str = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.tokens, self.saw = tokens, tuple(saw)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.tokens, self.saw))


class ImageError(RequestError):
    """A picture that cannot be read or exceeds a limit."""


class DocumentError(RequestError):
    """A document, or one page of it, that cannot be read or exceeds a limit."""


class PageTooLargeError(ImageError):
    """A picture that is within the limits but takes more visual tokens than memory was planned for."""


class QueueFullError(KaminariError):
    """The bounded queue is full; the same request may succeed after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message, retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return str(self.args[0])


class EngineError(KaminariError):
    """The engine failed while it served a request; other requests are not affected unless the message says so."""


class EngineClosedError(EngineError):
    """The engine is closing or closed and takes no more requests."""


class EngineUnhealthyError(EngineError):
    """The engine takes no requests for now, because it failed repeatedly; the message has the reason."""

    code = "engine_unhealthy"


class EngineRestartedError(EngineError):
    """The engine's process ended while it wrote this reply; the same request may succeed."""

    code = "engine_restarted"


class PoisonError(EngineError):
    """The engine's process ended each time it served this request, so it is not tried again."""

    code = "request_kills_engine"


class DeadlineError(KaminariError):
    """A request did not end within its `timeout`."""

    code = "timeout"


def _rebuild_request_error(kind: type[RequestError], message: str, param: str | None, code: str | None) -> RequestError:
    return kind(message, param=param, code=code)
