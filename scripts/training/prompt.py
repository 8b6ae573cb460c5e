"""The tokenizer of the tiny checkpoint and the token ids of its prompts.

One token is one byte; the special tokens follow the 256 bytes. The strings are those of Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ENDOFTEXT, IM_START, IM_END, VISION_START, VISION_END, VISION_PAD, IMAGE_PAD, VIDEO_PAD = range(256, 264)
VOCABULARY = 264

TASKS = ("Read all the text in the image.", "Describe this image.", "Convert this page to Markdown.")
QUESTIONS = ("What does it say?", "OCR", "Read this.", "What is written here?", "Text?", "Transcribe the picture.")

TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}"
    "{{- message.content }}"
    "{%- else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' or 'video' in part %}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}"
    "{{- part.text }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)


def encode(text: str) -> list[int]:
    """Give a text's token ids: its UTF-8 bytes."""
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """Give the text of token ids, special tokens dropped."""
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def prompt_ids(visual_tokens: Sequence[int], text: str) -> list[int]:
    """Give the ids of a user turn with pictures of so many visual tokens, then a text, up to the start of the answer."""
    ids = [IM_START, *encode("user\n")]
    for count in visual_tokens:
        ids += [VISION_START, *[IMAGE_PAD] * count, VISION_END]
    return [*ids, *encode(text), IM_END, *encode("\n"), IM_START, *encode("assistant\n")]


@dataclass(frozen=True)
class Form:
    """How an architecture takes pictures and prompts.

    `unit` is the side of a visual token in pixels; `image`, `end` and `pad` are token ids: of a visual token, of an answer's
    end, and of filling; `silent` is the text of a prompt that asks nothing in particular; `prompt_ids` as the function of this
    module.
    """

    unit: int
    image: int
    end: int
    pad: int
    silent: str
    tasks: tuple[str, ...]
    questions: tuple[str, ...]
    prompt_ids: Callable[[Sequence[int], str], list[int]]


QWEN3VL = Form(32, IMAGE_PAD, IM_END, ENDOFTEXT, "", TASKS, QUESTIONS, prompt_ids)
