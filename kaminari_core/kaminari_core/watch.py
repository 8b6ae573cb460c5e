"""What an engine tells whoever watches it from outside: which requests it has in hand, and that its steps go on.

The seam lies here so that neither the engine nor the loop knows about processes, pipes and signals. Each method is called
*before* the thing it names is done, so that a watcher in another process still knows it when the thing ends this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kaminari_core.errors import KaminariError


class Watch:
    """Watches nothing. Subclasses override what they need; every method must be quick and thread-safe."""

    def preparing(self, request_id: str) -> None:
        """A worker begins to prepare a request."""

    def prepared(self, request_id: str) -> None:
        """A request waits for its slot."""

    def starting(self, request_ids: Sequence[str]) -> None:
        """Requests were admitted; their prefill comes next."""

    def stepping(self) -> None:
        """A step begins, in the engine thread."""

    def stepped(self) -> None:
        """A step has ended, in the engine thread; its events have been sent."""

    def resting(self) -> None:
        """The engine thread has nothing to do and is about to wait."""

    def broken(self, error: KaminariError) -> None:
        """The engine thread cannot go on; the requests that are open fail with this error next."""
