"""Prepares requests for GLM-OCR: which numbers of the checkpoint the core's conversation processor gets, and a word of warning
when a prompt is not one of those that the model was trained on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from kaminari_core.config import EngineConfig
from kaminari_core.conversation import ConversationProcessor, read_tokenizer
from kaminari_core.flow import Message, Prepared, Request, TextPart
from kaminari_core.tasks import FIELD
from kaminari_glmocr.config import Config
from kaminari_glmocr.plugin import TASKS

logger = logging.getLogger(__name__)


class Processor(ConversationProcessor):
    """Prepares requests for one checkpoint under one engine's settings."""

    def __init__(self, checkpoint: Path, config: Config, engine: EngineConfig) -> None:
        super().__init__(
            read_tokenizer(checkpoint, _load_tokenizer),
            config.pictures.processor(engine, widen=True),
            image_token=config.image_token,
            control=config.markers,
            longest=min(engine.max_length, config.text.max_positions),
            default_prompt=TASKS["ocr"],
            refusals=(TemplateError,),
        )
        self._lock, self._warned = threading.Lock(), False

    def prepare(self, request: Request) -> Prepared:
        """See ConversationProcessor. The first prompt that is none of `TASKS` is warned of."""
        prepared = super().prepare(request)
        if is_free_prompt(request.messages):
            with self._lock:
                warned, self._warned = self._warned, True
            if not warned:
                logger.warning(
                    "GLM-OCR was trained on the prompts of its tasks (%s) only: a prompt of your own is likely to get "
                    "fragments. This is said once.",
                    ", ".join(TASKS),
                )
        return prepared


def is_free_prompt(messages: Sequence[Message]) -> bool:
    """Whether the last user message asks in words that are none of the tasks'."""
    asked = [message for message in messages if message.role == "user"][-1]
    words = "".join(part.text for part in asked.parts if isinstance(part, TextPart)).strip()
    begun = [phrase.partition(FIELD)[0].strip() for phrase in TASKS.values() if FIELD in phrase]
    return bool(words) and words not in TASKS.values() and not words.startswith(tuple(begun))


def _load_tokenizer(checkpoint: Path) -> Any:
    # Importing transformers takes seconds, and only a loaded model needs it.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
