"""What trains the tiny checkpoint computes what the reference class, the draft head's formula and the product compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kaminari_core.config import EngineConfig
from kaminari_core.flow import ImagePart, Message, Request, TextPart
from kaminari_core.parity import greedy
from kaminari_glmocr.model import load as load_product
from make_pages import Picture, Words, draw_line, draw_style
from tests.glmocr.test_draft import Formula, Observed
from training.batches import Batch, collate, join, prepare
from training.evaluate import read
from training.glmocr.architecture import DECODER_LAYERS, build
from training.glmocr.folder import load, save
from training.glmocr.forward import GlmReader
from training.glmocr.prompt import GLMOCR, TASKS
from training.prompt import decode

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with initial weights."""
    torch.manual_seed(5)
    reader = GlmReader(build())
    reader.start_patch()
    reader.fold_out()
    target = tmp_path_factory.mktemp("training") / "tiny"
    save(reader, target)
    return target


@pytest.fixture(scope="module")
def reader(folder: Path) -> GlmReader:
    return load(folder)


def lines(count: int) -> list[Picture]:
    random = np.random.default_rng(1)
    words = Words(random, held_out=False)
    drawn = [draw_line(words.line(), draw_style(random), random) for _ in range(40)]
    # Of one canvas, as the pictures of a batch must be.
    return [picture for picture in drawn if prepare(picture, GLMOCR).grid == (1, 16)][:count]


def turns() -> Batch:
    """Two turns of two pictures each."""
    samples = [prepare(picture, GLMOCR) for picture in lines(4)]
    pairs = [join(samples[0], samples[1]), join(samples[2], samples[3])]
    return collate(pairs, TASKS[0], max(len(pair.text) for pair in pairs) + 1, GLMOCR)


@torch.no_grad()
def test_the_training_forward_gives_the_logits_of_the_reference_class(reader: GlmReader) -> None:
    batch = turns()
    ours = reader(batch.patches, batch.grid, batch.ids, batch.positions, batch.answer).logits
    planes = batch.patches.reshape(-1, 1, 1, 14 * 14).expand(-1, 3, 2, -1).flatten(1)
    theirs = reader.model.eval()(
        input_ids=batch.ids,
        pixel_values=planes,
        image_grid_thw=torch.tensor([[1, 2 * batch.grid[0], 2 * batch.grid[1]]] * len(batch.patches)),
        mm_token_type_ids=(batch.ids == GLMOCR.image).long(),
    ).logits[:, batch.answer :]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


@torch.no_grad()
def test_the_draft_head_in_training_gives_the_logits_of_its_formula(folder: Path, reader: GlmReader) -> None:
    batch = turns()
    reader.drafting = True
    outputs = reader(batch.patches, batch.grid, batch.ids, batch.positions, batch.answer)
    reader.drafting = False
    formula = Formula(folder, f"model.language_model.layers.{DECODER_LAYERS}.")
    ids = batch.ids[0]
    embedded = reader.model.model.language_model.embed_tokens(ids[None])
    _, tokens, _ = reader.see(batch.patches[:2], batch.grid)
    hidden = reader.model.model.eval()(
        inputs_embeds=embedded.masked_scatter((ids == GLMOCR.image)[None, :, None], tokens),
        position_ids=batch.positions[:, None],
    ).last_hidden_state[0, :-1]
    positions = batch.positions[:, : len(ids) - 1]
    observed = Observed(
        batch.answer + 1, tuple(ids.tolist()), hidden, positions, ids[1:] == GLMOCR.image, tokens.flatten(0, 1)
    )
    states = formula.states(formula.joined(formula.embedded(observed), hidden), positions)
    expected = formula.logits(states)[batch.answer :]
    assert outputs.draft is not None
    torch.testing.assert_close(outputs.draft.logits[0], expected, atol=2e-4, rtol=0)


def test_the_reading_loop_and_the_product_read_the_same(folder: Path, reader: GlmReader, tmp_path: Path) -> None:
    [picture] = lines(1)
    Image.fromarray(picture.pixels).save(tmp_path / "line.png")
    product = load_product(folder, EngineConfig(device="cpu", dtype="float32", compile=False), CPU, lambda *_: None)
    part = ImagePart((tmp_path / "line.png").read_bytes())
    prepared = product.prepare(Request((Message("user", (part, TextPart(TASKS[0]))),)))
    tokens = greedy(product, prepared, 96).tokens
    ends = [index for index, token in enumerate(tokens) if token in (GLMOCR.end, GLMOCR.pad)]
    [ours] = read(reader, [picture])
    assert ours == decode(tokens[: ends[0] if ends else 96])
    assert len(set(tokens)) > 1
