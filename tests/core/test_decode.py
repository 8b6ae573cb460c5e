"""The decode core: buckets, one compile per bucket, and the same tokens as without compiling."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.decode import Bucket, DecodeCore, doubling
from kaminari_core.flow import Embedded
from kaminari_core.testing import TinyModel

LENGTH = 512


def _core(compile: bool, slots: int = 2) -> DecodeCore:
    model = TinyModel(EngineConfig(max_length=LENGTH))
    return DecodeCore(model, StaticCache(model.shape, slots, LENGTH, model.device, model.dtype), compile=compile)


def _greedy(core: DecodeCore, lengths: tuple[int, ...], steps: int) -> list[list[int]]:
    """Decode `steps` tokens for prompts of the given lengths, one row each."""
    generator = torch.Generator().manual_seed(5)
    model = core.model
    assert isinstance(model, TinyModel)
    rows = []
    with torch.inference_mode():
        for slot, length in enumerate(lengths):
            ids = torch.randint(0, 256, (length,), generator=generator)
            embedded = Embedded(model.decoder.embed_tokens(ids), torch.arange(length)[None])
            rows.append([int(model.prefill(embedded, 0, length, core.cache, slot).argmax())])
    for done in range(steps):
        at = [[length + done] for length in lengths]
        tokens = core.step([[row[-1]] for row in rows], at, at)[:, 0].argmax(-1).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
    return rows


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(1, 1, (1,)), (1, 8, (1, 2, 4, 8)), (1, 6, (1, 2, 4, 6)), (256, 100, (100,))]
)
def test_bucket_sizes_double_up_to_the_limit(first: int, last: int, expected: tuple[int, ...]) -> None:
    assert doubling(first, last) == expected


def test_the_smallest_bucket_that_covers_the_rows_is_used() -> None:
    core = _core(compile=False, slots=6)
    assert core.bucket(1, 0) == Bucket(1, 256)
    assert core.bucket(3, 255, 4) == Bucket(4, 256, 4)
    assert core.bucket(5, 256) == Bucket(6, 512)
    assert core.bucket(6, LENGTH - 1) == Bucket(6, 512)


def test_one_compile_per_bucket_none_after_warm_up_and_the_same_tokens() -> None:
    counters.clear()
    compiled = _core(compile=True)
    compiled.warm_up(lambda *_: None)
    assert compiled.compiles == len(compiled.buckets) == 4
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]
    for lengths in ((3,), (250,), (3, 11), (251, 30)):
        # The longest row of the last cases crosses from the first length bucket into the second.
        assert _greedy(compiled, lengths, 12) == _greedy(_core(compile=False), lengths, 12)
    assert compiled.compiles == 4
    assert counters["stats"]["unique_graphs"] == 4


def test_buckets_compile_when_first_used_without_warm_up() -> None:
    core = _core(compile=True)
    assert core.compiles == 0
    _greedy(core, (3,), 5)
    assert core.compiles == 1


def test_rows_without_a_request_leave_the_cache_alone() -> None:
    core = _core(compile=False, slots=4)
    core.cache.keys.uniform_(-1, 1)
    core.cache.values.uniform_(-1, 1)
    before = core.cache.keys.clone()
    core.step([[1], [2], [3]], [[5], [6], [7]], [[5], [6], [7]])
    changed = (core.cache.keys != before).any(dim=-1).any(dim=2).any(dim=0)
    assert changed.nonzero().tolist() == [[0, 5], [1, 6], [2, 7], [3, LENGTH]]
