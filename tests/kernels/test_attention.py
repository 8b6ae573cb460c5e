"""Decode attention against softmax written out in float64: ragged lengths, grouped heads, several tokens a row, dead rows."""

from __future__ import annotations

import pytest
import torch

from kaminari_core.kernels import operators

CASES = [
    # rows, width, kv heads, query heads of each, head size, positions
    (1, 1, 2, 2, 128, 300),
    (3, 4, 2, 3, 64, 70),
    (4, 2, 1, 1, 32, 513),
    (2, 1, 2, 2, 80, 40),
    (2, 3, 2, 2, 24, 17),
    (2, 1, 1, 8, 256, 150),
    (1, 1, 1, 4, 96, 1),
]


def written_out(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cursors: torch.Tensor, length: int
) -> torch.Tensor:
    rows, width, heads, size = query.shape
    group = heads // keys.shape[1]
    out = torch.zeros(rows, width, heads, size, dtype=torch.float64)
    for row in range(rows):
        for token in range(width):
            stop = int(cursors[row, token]) + 1
            if stop > length:
                continue
            for head in range(heads):
                seen = keys[row, head // group, :stop].double() @ query[row, token, head].double() / size**0.5
                out[row, token, head] = seen.softmax(0) @ values[row, head // group, :stop].double()
    return out.flatten(2)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_softmax_written_out(case: tuple[int, ...], dtype: torch.dtype, instructions: str) -> None:
    rows, width, kv_heads, group, size, length = case
    generator = torch.Generator().manual_seed(length)
    # Scores of some size, so that the largest of them matters.
    query = (4 * torch.randn(rows, width, kv_heads * group, size, generator=generator)).to(dtype)
    cache = torch.randn(2, rows + 2, kv_heads, length + 1, size, generator=generator).to(dtype)
    cursors = torch.randint(0, length, (rows, width), generator=generator)
    cursors[0, 0] = length - 1
    keys, values = cache
    got = operators.decode_attention(query, keys, values, cursors)
    expected = written_out(query, keys, values, cursors, length)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=0)
    for row in range(rows):
        alone = operators.decode_attention(query[row : row + 1], keys[row:], values[row:], cursors[row : row + 1])
        torch.testing.assert_close(alone[0], got[row], atol=0, rtol=0)


def test_rows_of_no_request_are_zero_and_read_nothing(instructions: str) -> None:
    query, keys = torch.randn(2, 2, 4, 32), torch.full((2, 2, 41, 32), float("nan"))
    cursors = torch.tensor([[40, 40], [40, 3]])
    keys[1, :, :4] = torch.randn(2, 4, 32)
    got = operators.decode_attention(query, keys, keys, cursors)
    assert (got[0] == 0).all()
    assert (got[1, 0] == 0).all()
    expected = written_out(query, keys, keys, cursors, 40)
    torch.testing.assert_close(got[1, 1].double(), expected[1, 1], atol=1e-6, rtol=0)


def test_a_key_that_is_no_number_shows_in_the_rows_that_see_it(instructions: str) -> None:
    query, keys, values = torch.randn(3, 1, 2, 32), torch.randn(3, 1, 50, 32), torch.randn(3, 1, 50, 32)
    keys[0, 0, 5, 3], values[1, 0, 5, 3] = float("nan"), float("nan")
    finite = torch.isfinite(operators.decode_attention(query, keys, values, torch.full((3, 1), 20)))
    assert not finite[0].any()
    assert not finite[1].all()
    assert finite[2].all()


@pytest.mark.usefixtures("kernels")
def test_what_does_not_go_together_is_an_error() -> None:
    query, keys, cursors = torch.randn(2, 1, 4, 32), torch.randn(2, 2, 9, 32), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="shapes do not go together"):
        operators.decode_attention(query, keys[:1], keys[:1], cursors)
    with pytest.raises(RuntimeError, match="one dtype"):
        operators.decode_attention(query.bfloat16(), keys, keys, cursors)
    turned = keys.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(RuntimeError, match="behind one another"):
        operators.decode_attention(query, turned, turned, cursors)
