"""Sizing against the reference processors' own resize and against the bucket rule written out."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.glm46v.image_processing_pil_glm46v import smart_resize as glm_resize
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen_resize

from kaminari_core.errors import ImageError, UsageError
from kaminari_core.sizing import bucket, budgets, closest_grid, exact

HARD_SIZES = [(1, 1), (1, 2), (2, 1), (31, 639), (639, 31), (257, 27), (27, 257), (1, 200), (200, 1), (48, 16), (80, 112),
              (997, 991), (7, 1009), (1700, 2200), (2480, 3508), (6000, 4000), (8, 1600)]  # fmt: skip
PRIMES = [2, 3, 5, 7, 13, 31, 61, 127, 251, 509, 1021, 2039]


def sizes() -> list[tuple[int, int]]:
    draw = random.Random(7)
    drawn = [(draw.randint(1, 4000), draw.randint(1, 4000)) for _ in range(300)]
    return HARD_SIZES + list(itertools.product(PRIMES, PRIMES)) + drawn


def test_ladder_doubles_from_the_minimum() -> None:
    assert budgets(64, 512) == (64, 128, 256, 512)
    assert budgets(8, 63) == (8, 16, 32)
    assert budgets(3, 3) == (3,)
    assert budgets(1, 16_384)[-1] == 16_384


@pytest.mark.parametrize("policy", [bucket, exact])
def test_bound_below_the_minimum_names_both(policy: type) -> None:
    with pytest.raises(UsageError, match=r"32\b.*\b64\b"):
        policy(100, 100, 32, 64, 32)


@pytest.mark.parametrize(
    ("size", "tokens", "grid"),
    [
        ((640, 640), 64, (8, 8)),
        ((1600, 100), 64, (2, 32)),
        ((100, 1600), 64, (32, 2)),
        ((5000, 1), 64, (1, 64)),
        ((100, 100), 2, (1, 2)),  # equally close: the wider
        ((200, 100), 4, (1, 4)),  # as close to 1 : 1 as to 4 : 1
        ((100, 200), 4, (2, 2)),
        ((300, 200), 12, (3, 4)),
    ],
)
def test_closest_grid(size: tuple[int, int], tokens: int, grid: tuple[int, int]) -> None:
    assert closest_grid(*size, tokens) == grid


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 2, 12, 64, 96, 512]))
def test_closest_grid_is_closest_in_the_logarithm(width: int, height: int, tokens: int) -> None:
    rows, columns = closest_grid(width, height, tokens)
    assert rows * columns == tokens
    distances = [
        abs(math.log(tokens // r / r) - math.log(width / height)) for r in range(1, tokens + 1) if tokens % r == 0
    ]
    assert abs(math.log(columns / rows) - math.log(width / height)) == pytest.approx(min(distances), abs=1e-12)


@pytest.mark.parametrize(
    ("size", "canvas", "content", "grid"),
    [
        ((640, 200), (1024, 256), (192, 28, 640, 200), (8, 32)),  # held by 256 tokens, not by 128
        ((256, 256), (256, 256), (0, 0, 256, 256), (8, 8)),  # fits exactly
        ((257, 256), (512, 256), (127, 0, 257, 256), (8, 16)),  # one pixel too wide: twice the canvas
        ((100, 100), (256, 256), (0, 0, 256, 256), (8, 8)),  # enlarged to the least area the model knows
        ((1, 1), (256, 256), (0, 0, 256, 256), (8, 8)),
        ((2000, 1000), (1024, 512), (0, 0, 1024, 512), (16, 32)),  # shrunk onto the largest
        ((1000, 999), (512, 512), (0, 0, 512, 511), (16, 16)),  # 512 tokens have no square grid: no pixel more for them
        ((1000, 1414), (512, 1024), (0, 150, 512, 724), (32, 16)),  # twice the tokens make a page 1.41 times as long
        ((300, 299), (512, 512), (106, 106, 300, 299), (16, 16)),
    ],
)
def test_bucket_examples(
    size: tuple[int, int], canvas: tuple[int, int], content: tuple[int, ...], grid: tuple[int, int]
) -> None:
    layout = bucket(*size, 32, 64, 512)
    assert (layout.canvas, layout.content, layout.grid, layout.budget) == (canvas, content, grid, 512)


@pytest.mark.parametrize(("unit", "least", "most"), [(32, 64, 512), (28, 8, 1000), (32, 4, 64)])
def test_bucket_keeps_its_promises(unit: int, least: int, most: int) -> None:
    for width, height in sizes():
        layout = bucket(width, height, unit, least, most)
        left, top, fitted_width, fitted_height = layout.content
        assert layout.canvas == (layout.grid[1] * unit, layout.grid[0] * unit)
        assert layout.tokens in budgets(least, most)
        assert left >= 0
        assert top >= 0
        assert min(fitted_width, fitted_height) >= 1
        assert layout.canvas[0] - fitted_width - 2 * left in (0, 1)
        assert layout.canvas[1] - fitted_height - 2 * top in (0, 1)
        across, down = (height, width) if width < height else (width, height)
        long, short = max(fitted_width, fitted_height), min(fitted_width, fitted_height)
        assert abs(short - down * long / across) <= max(0.5, 0.5 * down / across + 0.5)
        if width * height >= least * unit**2:
            assert fitted_width <= width
            assert fitted_height <= height
        scale = min(layout.canvas[0] / width, layout.canvas[1] / height)
        if scale < 1:
            larger = [closest_grid(width, height, tokens) for tokens in budgets(least, most) if tokens > layout.tokens]
            for rows, columns in larger:
                assert min(columns * unit / width, rows * unit / height) <= min(1, 1.1 * scale) + 1e-9


def test_bucket_takes_the_smallest_canvas_that_holds() -> None:
    for width, height in sizes():
        layout = bucket(width, height, 32, 16, 512)
        for smaller in (tokens for tokens in budgets(16, 512) if tokens < layout.tokens):
            rows, columns = closest_grid(width, height, smaller)
            assert width > columns * 32 or height > rows * 32


def test_bucket_letterboxes_long_strips_until_a_side_vanishes() -> None:
    assert bucket(1, 5000, 32, 64, 512).grid == (256, 1)
    assert bucket(30_000, 1, 32, 64, 512).content[3] == 1
    with pytest.raises(ImageError, match="100000 x 1 ") as caught:
        bucket(100_000, 1, 32, 64, 512, name="strip.png")
    assert caught.value.param == "strip.png"


def test_exact_equals_the_qwen_processor() -> None:
    compared = 0
    for (width, height), most in itertools.product(sizes(), (64, 512, 16_384)):
        if max(width, height) > 200 * min(width, height):
            continue
        expected = qwen_resize(height, width, factor=32, min_pixels=64 * 1024, max_pixels=most * 1024)
        if expected[0] * expected[1] > most * 1024:
            with pytest.raises(ImageError, match=rf"at most {most} "):
                exact(width, height, 32, 64, most)
            continue
        layout = exact(width, height, 32, 64, most)
        assert (layout.canvas[1], layout.canvas[0]) == expected
        assert layout.content == (0, 0, *layout.canvas)
        assert min(layout.grid) >= 1
        assert layout.tokens <= most
        compared += 1
    assert compared > 900


def test_exact_equals_the_glm_processor() -> None:
    compared = 0
    for (width, height), most in itertools.product(sizes(), (512, 6144)):
        try:
            expected = glm_resize(2, height, width, 2, 28, 2 * 8 * 784, 2 * most * 784)
        except ValueError:
            with pytest.raises(ImageError, match=r": 1"):
                exact(width, height, 28, 8, most, widen=True)
            continue
        if expected[0] * expected[1] > most * 784:
            continue
        layout = exact(width, height, 28, 8, most, widen=True)
        assert (layout.canvas[1], layout.canvas[0]) == expected
        compared += 1
    assert compared > 600


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (1, 5000)])
def test_exact_refuses_extreme_ratios_by_name(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match=rf"{max(size)} : 1.*200 : 1") as caught:
        exact(*size, 32, 64, 512, name="messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"


def test_exact_stays_in_bounds_where_a_side_would_round_to_zero() -> None:
    assert exact(31, 639, 28, 1, 20).grid == (20, 1)


def test_more_budget_gives_more_tokens() -> None:
    for policy in (bucket, exact):
        counts = [policy(2000, 1500, 32, 64, most).tokens for most in (64, 128, 256, 512, 1024)]
        assert counts == sorted(set(counts))
