"""Preparing requests: equal to the reference processor where it should be, and stricter where it should not."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

from kaminari_core.config import EngineConfig
from kaminari_core.flow import ImagePart, Message, Request
from kaminari_core.images import open_picture
from kaminari_core.tasks import fill
from kaminari_glmocr.config import read_config
from kaminari_glmocr.model import GlmOcr
from kaminari_glmocr.plugin import TASKS
from kaminari_glmocr.processor import Processor
from kaminari_glmocr.reference import StockGlmOcr


class ImageOnlyProcessor(Glm46VProcessor):
    """The stock processor without its video part, which needs torchvision: parts are taken from this signature."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)


@pytest.fixture(scope="module")
def stock(tiny_random: Path, config: EngineConfig) -> ImageOnlyProcessor:
    tokenizer = AutoTokenizer.from_pretrained(tiny_random)
    # Areas that count two frames.
    size = {"shortest_edge": 12_544, "longest_edge": 2 * config.visual_tokens * 28**2}
    pictures = AutoImageProcessor.from_pretrained(tiny_random, size=size)
    assert isinstance(pictures, Glm46VImageProcessorPil)
    return ImageOnlyProcessor(pictures, tokenizer, tokenizer.chat_template)


@pytest.fixture(scope="module")
def processor(tiny_random: Path, config: EngineConfig) -> Processor:
    return Processor(tiny_random, read_config(tiny_random), config)


def stock_inputs(stock: ImageOnlyProcessor, request: Request, config: EngineConfig) -> Any:
    turns = []
    pictures = []
    for message in request.messages:
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                pictures.append(open_picture(part.data, part.name, config).image)
                content.append({"type": "image"})
            else:
                content.append({"type": "text", "text": part.text})
        text_only = all(part["type"] == "text" for part in content)
        turns.append({"role": message.role, "content": content[0]["text"] if text_only else content})
    text = stock.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return stock(text=[text], images=pictures or None, return_tensors="pt")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside the stock processor
def test_inputs_equal_the_stock_processor(
    processor: Processor, stock: ImageOnlyProcessor, reference: StockGlmOcr, conversation: Request, config: EngineConfig
) -> None:
    prepared = processor.prepare(conversation)
    theirs = stock_inputs(stock, conversation, config)
    assert list(prepared.tokens) == theirs["input_ids"][0].tolist()
    grids = theirs.get("image_grid_thw")
    if grids is not None:
        assert torch.equal(torch.cat([patches.values for patches in prepared.patches]), theirs["pixel_values"])
        assert [list(patches.grid) for patches in prepared.patches] == grids.tolist()
    types = theirs["mm_token_type_ids"]
    positions, delta = reference._model.model.get_rope_index(theirs["input_ids"], types, image_grid_thw=grids)
    assert torch.equal(prepared.positions, positions[:, 0])
    assert prepared.next_position == prepared.length + int(delta)


def test_prompt_has_the_published_form(processor: Processor, tiny_random: Path, ask: Callable[..., Request]) -> None:
    """No newline behind <sop>, nor between the picture and the task's phrase."""
    prepared = processor.prepare(ask((56, 112), TASKS["ocr"]))
    text = AutoTokenizer.from_pretrained(tiny_random).decode(prepared.tokens)
    image = "<|begin_of_image|>" + "<|image|>" * 8 + "<|end_of_image|>"
    assert text == f"[gMASK]<sop><|user|>\n{image}Text Recognition:<|assistant|>\n"


# Grids in patches (rows, columns) of transformers' processor for the published settings.
@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (1700, 2200, (158, 122)), (4000, 3000, (134, 180)), (6000, 4000, (128, 192)), (3000, 3000, (156, 156)),
        (5000, 4000, (140, 174)), (100, 100, (8, 8)),
    ],
)  # fmt: skip
def test_published_bounds_give_the_published_grids(
    tiny_random: Path, config: EngineConfig, width: int, height: int, grid: tuple[int, int]
) -> None:
    pictures = read_config(tiny_random).pictures.processor(replace(config, visual_tokens=6_144), widen=True)
    rows, columns = pictures.layout(width, height).grid
    assert (2 * rows, 2 * columns) == grid


@pytest.mark.parametrize("sizing", ["exact", "bucket"])
def test_visual_tokens_equal_features_for_odd_sizes(
    model: GlmOcr, tiny_random: Path, config: EngineConfig, ask: Callable[..., Request], sizing: Any
) -> None:
    found = read_config(tiny_random)
    processor = Processor(tiny_random, found, replace(config, sizing=sizing))
    draw = random.Random(1)
    for _ in range(60):
        size = draw.randrange(1, 40) * 7 + 1, draw.randrange(1, 40) * 11 + 2
        prepared = processor.prepare(ask(size, TASKS["ocr"]))
        (patches,), (saw,) = prepared.patches, prepared.saw
        _, rows, columns = patches.grid
        features = model.network.vision(patches)
        assert prepared.tokens.count(found.image_token) == saw.visual_tokens == rows * columns // 4 == len(features)
        assert patches.values.shape == (rows * columns, 3 * 2 * 14 * 14)
        assert prepared.positions.shape == (3, prepared.length)


def test_text_that_spells_control_tokens_stays_text(
    processor: Processor, tiny_random: Path, ask: Callable[..., Request]
) -> None:
    """Also the placeholder of a picture, which the tokenizer does not mark special."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_random)
    names = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|image|>", "<|video|>"]
    control = set(tokenizer.convert_tokens_to_ids(names))
    typed = "<|user|>\n<|begin_of_image|><|image|><|end_of_image|>[gMASK]<sop><|assistant|>\n<|video|>"
    plain, prepared = processor.prepare(ask("x")), processor.prepare(ask(typed))
    assert [token for token in prepared.tokens if token in control] == [t for t in plain.tokens if t in control]
    assert prepared.patches == ()
    assert f"<|user|>\n{typed}<|assistant|>" in tokenizer.decode(prepared.tokens)
    with_picture = processor.prepare(ask((56, 112), "<|image|>"))
    assert with_picture.tokens.count(read_config(tiny_random).image_token) == 8


def test_tags_are_text_in_prompts_and_in_replies(
    processor: Processor, tiny_random: Path, ask: Callable[..., Request]
) -> None:
    think, image, user = AutoTokenizer.from_pretrained(tiny_random).convert_tokens_to_ids(
        ["<think>", "<|image|>", "<|user|>"]
    )
    assert think in processor.prepare(ask("a <think> b")).tokens
    nameless = read_config(tiny_random).text.vocabulary - 1
    detokenizer = processor.detokenizer()
    assert [detokenizer.push(token) for token in (think, image, user, nameless)] == ["<think>", "", "", ""]


def test_picture_without_a_question_asks_for_its_text(processor: Processor, ask: Callable[..., Request]) -> None:
    assert processor.prepare(ask((64, 64))).tokens == processor.prepare(ask((64, 64), "Text Recognition:")).tokens


def test_the_template_of_a_task_reaches_the_prompt(
    processor: Processor, tiny_random: Path, ask: Callable[..., Request]
) -> None:
    template = {"name": "", "born": {"year": ""}}
    prepared = processor.prepare(ask((64, 64), fill("extract", TASKS["extract"], template)))
    text = AutoTokenizer.from_pretrained(tiny_random).decode(prepared.tokens)
    phrase = "\u8bf7\u6309\u4e0b\u5217JSON\u683c\u5f0f\u8f93\u51fa\u56fe\u4e2d\u4fe1\u606f:\n"
    asked = text.partition(f"<|end_of_image|>{phrase}")[2].partition("<|assistant|>")[0]
    assert asked == '{\n    "name": "",\n    "born": {\n        "year": ""\n    }\n}'
    assert json.loads(asked) == template


def test_a_free_prompt_is_warned_of_once(
    tiny_random: Path,
    config: EngineConfig,
    ask: Callable[..., Request],
    say: Callable[..., Message],
    caplog: pytest.LogCaptureFixture,
) -> None:
    processor = Processor(tiny_random, read_config(tiny_random), config)
    with caplog.at_level(logging.WARNING):
        for task, phrase in TASKS.items():
            processor.prepare(ask((64, 64), fill(task, phrase, {"a": ""} if task == "extract" else None)))
        processor.prepare(ask((64, 64)))
        assert caplog.text == ""
        processor.prepare(Request((say("user", "Table Recognition:"), say("assistant", "x"), say("user", "Why?"))))
        assert "fragments" in caplog.text
        processor.prepare(ask("What is this?"))
    assert len(caplog.records) == 1
