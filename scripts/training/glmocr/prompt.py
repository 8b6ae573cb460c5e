"""The token ids of GLM-OCR's tiny checkpoint: one token per byte, then GLM's control tokens, with the published strings."""

from __future__ import annotations

from collections.abc import Sequence

from random_glmocr import MARKED_TEXT, SPECIAL_TOKENS
from training.prompt import QUESTIONS, Form, encode

NAMES = (*SPECIAL_TOKENS, *MARKED_TEXT)
IDS = {name: 256 + index for index, name in enumerate(NAMES)}
VOCABULARY = 256 + len(NAMES)
ENDOFTEXT, USER, IMAGE = IDS["<|endoftext|>"], IDS["<|user|>"], IDS["<|image|>"]
TASKS = ("Text Recognition:", "Table Recognition:", "Formula Recognition:")


def prompt_ids(visual_tokens: Sequence[int], text: str) -> list[int]:
    """Give the ids of a user turn with pictures of so many visual tokens, then a text, up to the start of the answer."""
    ids = [IDS["[gMASK]"], IDS["<sop>"], USER, *encode("\n")]
    for count in visual_tokens:
        ids += [IDS["<|begin_of_image|>"], *[IMAGE] * count, IDS["<|end_of_image|>"]]
    return [*ids, *encode(text), IDS["<|assistant|>"], *encode("\n")]


GLMOCR = Form(28, IMAGE, USER, ENDOFTEXT, TASKS[0], TASKS, QUESTIONS, prompt_ids)
