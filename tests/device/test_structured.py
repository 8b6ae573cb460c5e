"""Structured output on every device; see test_device.py for how a card is chosen."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.flow import Message, Request, Sampling, TextPart
from kaminari_core.sampling import RowSampler
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.structured.grammars import Grammars
from kaminari_core.structured.masks import Masks
from kaminari_core.structured.structure import Structure
from kaminari_core.testing import VOCABULARY, TinyModel

DEVICE = torch.device(os.environ.get("KAMINARI_TEST_DEVICE", "cpu"))
CONFIG = EngineConfig(device=str(DEVICE), slots=2, max_length=256, compile=False)


def test_masks_reach_the_device_and_are_applied_without_waiting_for_it() -> None:
    constraint = Grammars(TinyModel(CONFIG)).constraint(Structure.regex("[a-c]x"))
    masks = Masks(2, VOCABULARY, DEVICE)
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sampler = RowSampler(Sampling(temperature=1.0, seed=1), (), VOCABULARY, DEVICE)
    used = masks.write(constraint, (ord("b"),), 0)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        forbidden = masks.forbidden(used)
        chosen = [sampler.choose(logits, row) for row in forbidden]
        greedy = logits.masked_fill(forbidden, -torch.inf).argmax(dim=-1)
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    allowed = [set((~row).nonzero()[:, 0].tolist()) for row in forbidden.cpu()]
    assert allowed == [set(b"abc"), {ord("x")}]
    assert int(chosen[0]) in allowed[0]
    assert int(chosen[1]) == int(greedy[1]) == ord("x")
    assert int(greedy[0]) == max(allowed[0], key=lambda token: float(logits[token]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_have_their_structure(temperature: float) -> None:
    model = TinyModel(CONFIG)
    cache = StaticCache(model.shape, 2, 256, model.device, model.dtype)
    request = Request(
        (Message("user", (TextPart("read"),)),),
        structure=Structure.regex("[A-Z]{3}-[0-9]{4}"),
        sampling=Sampling(temperature=temperature, seed=1),
    )
    with Engine("test", model, cache, ContinuousScheduler(CONFIG), CONFIG) as engine:
        held = engine.generate(request)
        free = engine.generate(replace(request, structure=None, max_tokens=8, id="free"))
    assert re.fullmatch("[A-Z]{3}-[0-9]{4}", held.text)
    assert (held.complete, free.complete) == (True, None)
