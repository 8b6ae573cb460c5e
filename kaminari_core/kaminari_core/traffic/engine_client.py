"""The client of an engine in this process, which needs no server."""

from __future__ import annotations

import time

from kaminari_core.flow import Delta, Failed, Finished, Message, Request, TextPart
from kaminari_core.serving import Serving
from kaminari_core.traffic.clients import Answer


class EngineClient:
    """Asks an engine to go on after a prompt, past end tokens, for a number of tokens."""

    def __init__(self, engine: Serving, prompt: str, new_tokens: int) -> None:
        self._engine, self._prompt, self._new_tokens = engine, prompt, new_tokens

    def ask(self, number: int) -> Answer:
        """See `clients.Client`."""
        message = Message("user", (TextPart(f"{number} {self._prompt}"),))
        answer = Answer(time.monotonic())
        for event in self._engine.stream(Request((message,), max_tokens=self._new_tokens, ignore_end=True)):
            match event:
                case Delta():
                    answer.times.append(time.monotonic())
                case Finished(result=result):
                    answer.tokens = result.usage.completion_tokens
                    answer.prompt_tokens = result.usage.prompt_tokens
                case Failed(error=error):
                    raise error
        answer.ended = time.monotonic()
        return answer
