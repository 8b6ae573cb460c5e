"""Prepares requests for Qwen3-VL: which numbers of the checkpoint the core's conversation processor gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from kaminari_core.config import EngineConfig
from kaminari_core.conversation import ConversationProcessor, read_tokenizer
from kaminari_qwen3vl.config import Config
from kaminari_qwen3vl.plugin import TASKS


class Processor(ConversationProcessor):
    """Prepares requests for one checkpoint under one engine's settings."""

    def __init__(self, checkpoint: Path, config: Config, engine: EngineConfig) -> None:
        super().__init__(
            read_tokenizer(checkpoint, _load_tokenizer),
            config.pictures.processor(engine),
            image_token=config.image_token,
            longest=min(engine.max_length, config.text.max_positions),
            default_prompt=TASKS["ocr"],
            refusals=(TemplateError,),
        )


def _load_tokenizer(checkpoint: Path) -> Any:
    # Importing transformers takes seconds, and only a loaded model needs it.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
