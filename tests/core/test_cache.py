"""The slot cache: fixed addresses, lowest slot first, moves that keep a row's contents."""

from __future__ import annotations

import pytest
import torch

from kaminari_core.cache import StaticCache
from kaminari_core.protocols import Cache, ModelShape

SHAPE = ModelShape(
    layers=3, hidden=8, heads=2, kv_heads=2, head_dim=4, vocabulary=10, max_positions=64, end_tokens=(0,)
)


@pytest.fixture
def cache() -> StaticCache:
    return StaticCache(SHAPE, 4, 16, torch.device("cpu"), torch.float32)


def test_it_is_a_cache(cache: StaticCache) -> None:
    assert isinstance(cache, Cache)


def test_size_is_layers_slots_heads_positions_and_features(cache: StaticCache) -> None:
    assert cache.bytes == 2 * 3 * 4 * 2 * (16 + 1) * 4 * 4


def test_slots_are_claimed_lowest_first(cache: StaticCache) -> None:
    assert [cache.claim() for _ in range(4)] == [0, 1, 2, 3]
    assert cache.free == 0
    cache.release(2)
    cache.release(1)
    assert cache.claim() == 1


def test_a_move_keeps_the_row_and_the_addresses(cache: StaticCache) -> None:
    addresses = cache.keys.data_ptr(), cache.values.data_ptr()
    for slot in range(3):
        assert cache.claim() == slot
    cache.keys[:, 2] = torch.randn(3, 2, 17, 4)
    cache.values[:, 2] = torch.randn(3, 2, 17, 4)
    keys, values = cache.keys[:, 2, :, :9].clone(), cache.values[:, 2, :, :9].clone()
    cache.release(0)
    cache.move(2, 0, 9)
    assert torch.equal(cache.keys[:, 0, :, :9], keys)
    assert torch.equal(cache.values[:, 0, :, :9], values)
    assert not cache.keys[:, 0, :, 9:].any(), "only the live positions are copied"
    assert (cache.free, cache.claim()) == (2, 2)
    assert addresses == (cache.keys.data_ptr(), cache.values.data_ptr())


def test_a_double_release_is_caught(cache: StaticCache) -> None:
    cache.release(cache.claim())
    with pytest.raises(AssertionError, match="was not claimed"):
        cache.release(0)
