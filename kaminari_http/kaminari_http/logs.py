"""The server's log, as lines for people or as one JSON object a line for programs.

What belongs to a request is logged with `extra=`: its id, status, model, counts and times. No prompt, reply or picture is logged,
in neither format; an exception's message may quote what a client sent, such as a name.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

Format = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIELDS = (
    "request_id", "method", "path", "status", "seconds", "model", "engine_request", "finish", "prompt_tokens", "completion_tokens"
)  # fmt: skip
"""What a record may carry beside its message."""


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, the `FIELDS` that a record has, and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_logging(level: str, form: Format) -> None:
    """Log to stderr, with one line a request instead of uvicorn's own, which have no request id."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
