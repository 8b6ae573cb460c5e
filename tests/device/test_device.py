"""What must hold on every device: the CPU by default, a card with `KAMINARI_TEST_DEVICE=cuda` (`make gpu-check`)."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.decode import DecodeCore
from kaminari_core.engine import Engine
from kaminari_core.flow import Embedded, Event, Failed, Finished, Message, Request, Sampling, TextPart
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.testing import TinyModel

DEVICE = os.environ.get("KAMINARI_TEST_DEVICE", "cpu")
CONFIG = EngineConfig(device=DEVICE, slots=2, max_length=512, max_tokens=32)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(CONFIG)


def _core(model: TinyModel, compile: bool) -> DecodeCore:
    return DecodeCore(model, StaticCache(model.shape, 2, 512, model.device, model.dtype), compile=compile)


def _ask(text: str, **options: object) -> Request:
    return Request((Message("user", (TextPart(text),)),), **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_compiled_and_captured_steps_give_the_eager_tokens_and_keep_their_addresses(model: TinyModel) -> None:
    rows: dict[bool, list[list[int]]] = {}
    for compile in (False, True):
        core = _core(model, compile)
        if compile:
            core.warm_up(lambda *_: None)
            compiles = core.compiles
        addresses = core.cache.keys.data_ptr(), core.cache.values.data_ptr()
        lengths = (250, 40)
        with torch.inference_mode():
            tokens = []
            for slot, length in enumerate(lengths):
                ids = torch.arange(length, device=model.device) % 251
                embedded = Embedded(model.decoder.embed_tokens(ids), torch.arange(length, device=model.device)[None])
                tokens.append([int(model.prefill(embedded, 0, length, core.cache, slot).argmax())])
        for done in range(16):
            at = [[length + done] for length in lengths]
            chosen = core.step([[row[-1]] for row in tokens], at, at)[:, 0].argmax(-1).tolist()
            for row, token in zip(tokens, chosen, strict=True):
                row.append(token)
        rows[compile] = tokens
        assert addresses == (core.cache.keys.data_ptr(), core.cache.values.data_ptr())
    assert rows[True] == rows[False]
    assert core.compiles == compiles == len(core.buckets)


def test_several_rows_give_what_each_gives_alone(model: TinyModel) -> None:
    config = EngineConfig(device=DEVICE, slots=2, max_length=512, max_tokens=32, compile=False)
    cache = StaticCache(model.shape, 2, 512, model.device, model.dtype)
    asks = [
        ("hello", Sampling()),
        ("what is this " * 9, Sampling(temperature=1.0, seed=3)),
        ("x", Sampling(logprobs=2)),
    ]
    with Engine("device", model, cache, ContinuousScheduler(config), config) as engine:
        alone = [engine.generate(_ask(text, sampling=sampling)).text for text, sampling in asks]
        ends: dict[str, str] = {}
        done = threading.Event()

        def sink(event: Event) -> None:
            assert not isinstance(event, Failed), event
            if isinstance(event, Finished):
                ends[event.request_id] = event.result.text
                if len(ends) == len(asks):
                    done.set()

        requests = [_ask(text, sampling=sampling) for text, sampling in asks]
        for request in requests:
            engine.submit(request, sink)
        assert done.wait(60)
    assert [ends[request.id] for request in requests] == alone
