"""The parent's hold on one child process: its two pipes, a thread for each, and how it is ended."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from kaminari_core.supervise.child import STACKS_SIGNAL, main
from kaminari_core.supervise.messages import Setup

logger = logging.getLogger(__name__)

WATCHDOG = 1
"""Exit code of faulthandler's watchdog."""
STACKS_SECONDS = 0.5
"""How long a child that is about to be killed may take to write its stacks."""


class ChildProcess:
    """A child that runs. `heard` is the time.monotonic() of its last message, `ended` whether its pipe has closed.

    Every message is handed to `receive(child, message)` in the reading thread; `ending(child)` is called there when no more will
    come. The process is spawned, not forked, so that the child can use a device whatever this process has done.
    """

    def __init__(
        self,
        setup: Setup,
        receive: Callable[[ChildProcess, Any], None],
        ending: Callable[[ChildProcess], None],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        their_commands, self._commands = context.Pipe(duplex=False)
        self._reports, their_reports = context.Pipe(duplex=False)
        self.process = context.Process(target=main, args=(their_commands, their_reports, setup), name="kaminari-engine")
        self.heard = time.monotonic()
        self.ended = False
        self.ready = False
        self._receive, self._ending = receive, ending
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.process.start()
        # Theirs are open in the child alone, so that its end is seen here, and ours there.
        their_commands.close()
        their_reports.close()
        self._threads = [
            threading.Thread(target=work, name=f"engine-{name}", daemon=True)
            for name, work in (("reader", self._read), ("writer", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, command: Any) -> None:
        """Send a command; returns at once, whether or not the child reads."""
        self._outbox.put(command)

    def describe_end(self) -> str:
        """How the process ended, as the end of a sentence."""
        code = self.process.exitcode
        if code is None:
            return "ended"
        if code == WATCHDOG:
            return (
                f"ended with exit code {code}, as it does when a step hangs for --stall-seconds; the log has the stacks"
            )
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"was killed by signal {-code}"

    def kill(self, *, stacks: bool = False) -> None:
        """End the process at once and wait for it; `stacks` lets it write down first what it was doing."""
        if stacks and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, STACKS_SIGNAL)
            self.process.join(STACKS_SECONDS)
        if self.process.is_alive():
            self.process.kill()
        self.join()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end and release everything; False when it did not come in time."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            return False
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        self._commands.close()
        self._reports.close()
        return True

    def _read(self) -> None:
        try:
            while True:
                message = self._reports.recv()
                self.heard = time.monotonic()
                self._receive(self, message)
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("a message of the engine's process cannot be handled, so it is ended")
            self.process.kill()
        finally:
            self.ended = True
            self._ending(self)

    def _write(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self._commands.send(command)
            except OSError:
                return
