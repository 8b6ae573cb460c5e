"""Long pages are cut between lines, and the texts of their pieces become one with every line once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from kaminari_core.config import EngineConfig
from kaminari_core.documents.join import Line, join_lines, join_pieces
from kaminari_core.documents.split import LONG, Piece, cut, tallest_piece
from kaminari_core.sizing import bucket
from kaminari_core.testing import TinyModel
from scripts.pages.kinds import draw_page
from tests.documents.files import noisy

SHAPE = replace(TinyModel(EngineConfig()).shape, image_unit=32, min_visual_tokens=8)


def middles(text: str, centres: np.ndarray) -> list[float]:
    """The row in the middle of each line."""
    found, start = [], 0
    for line in text.split("\n"):
        found.append(float(np.nanmean(centres[start : start + len(line), 1])))
        start += len(line) + 1
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("deviation", [0, 6])
def test_a_receipt_is_cut_between_its_lines(seed: int, deviation: float) -> None:
    picture = draw_page("long", seed).picture
    image = noisy(Image.fromarray(picture.pixels), deviation, seed)
    pieces = cut(image, 512)
    assert (pieces[0].top, pieces[-1].bottom) == (0, image.height)
    assert all(above.bottom == below.top for above, below in pairwise(pieces))
    assert all(256 <= piece.bottom - piece.top <= 512 and not piece.shared for piece in pieces)
    rows = middles(picture.text, picture.centres)
    assert sum(piece.top <= row < piece.bottom for row in rows for piece in pieces) == len(rows)
    # Half the size of the print, at least, lies between the middle of a line and a cut.
    assert min(abs(row - piece.bottom) for row in rows for piece in pieces[:-1]) > 8


def test_frames_and_equals_signs_do_not_stand_in_the_way() -> None:
    image = Image.new("RGB", (200, 2400), "white")
    image.paste("black", (0, 0, 2, 2400))
    for top in range(10, 2400, 40):
        # Two bars, as of a row of equals signs: between them is a gap, but not one between lines.
        for left in range(20, 180, 12):
            image.paste("black", (left, top, left + 8, top + 3))
            image.paste("black", (left, top + 7, left + 8, top + 10))
    pieces = cut(image, 500)
    assert not any(piece.shared for piece in pieces)
    assert all((piece.bottom - 10) % 40 > 10 for piece in pieces[:-1])


def test_without_a_gap_pieces_share_rows() -> None:
    image = Image.effect_noise((200, 2000), 200).convert("RGB")
    pieces = cut(image, 500)
    assert (pieces[0], pieces[-1].bottom) == (Piece(0, 500), 2000)
    for above, below in pairwise(pieces):
        assert below.shared == above.bottom - below.top > 0
        assert below.bottom - below.top <= 500


@pytest.mark.parametrize("sizing", ["bucket", "exact"])
@pytest.mark.parametrize(("width", "height"), [(224, 2688), (300, 3600), (1000, 12000), (90, 20000)])
def test_pieces_are_seen_unshrunk_where_the_budget_allows(sizing: str, width: int, height: int) -> None:
    config = EngineConfig(visual_tokens=512, sizing=sizing)  # type: ignore[arg-type]
    tallest = tallest_piece(width, height, SHAPE, config)
    assert tallest is not None
    assert tallest >= width
    if sizing == "bucket" and width < 700:
        assert bucket(width, tallest, 32, 8, 512).content[2:] == (width, tallest)


def test_what_is_not_long_or_not_shrunk_is_seen_whole() -> None:
    config = EngineConfig(visual_tokens=512)
    assert tallest_piece(1654, 2339, SHAPE, config) is None
    assert tallest_piece(1000, int(1000 * LONG) - 1, SHAPE, config) is None
    assert tallest_piece(100, 1200, SHAPE, config) is None
    assert tallest_piece(1000, 12000, replace(SHAPE, image_unit=None), config) is None


def lines(*texts: str) -> list[Line]:
    return [Line(text) for text in texts]


def joined(above: list[str], below: list[str], expected: int) -> list[str]:
    return [line.text for line in join_lines(lines(*above), lines(*below), expected)]


def test_lines_that_were_read_twice_are_there_once() -> None:
    assert joined(["Tea 1.00", "Milk 2.00", "Bread 3.50"], ["Milk 2.00", "Bread 3.50", "Total 6.50"], 2) == [
        "Tea 1.00",
        "Milk 2.00",
        "Bread 3.50",
        "Total 6.50",
    ]
    # The last line of the upper piece and the first of the lower one are halves, and nothing was read twice alike.
    assert joined(["Tea 1.00", "Milk 2.O0", "Bread 3.5"], ["lk 2.00", "Bread 3.50", "Total 6.50"], 2) == [
        "Tea 1.00",
        "Milk 2.O0",
        "Bread 3.50",
        "Total 6.50",
    ]


def test_true_repetitions_stay() -> None:
    assert joined(["Head", "Tea 1.00", "Tea 1.00", "Tea 1.00"], ["Tea 1.00", "Tea 1.00", "Total"], 2) == [
        "Head",
        *["Tea 1.00"] * 3,
        "Total",
    ]


def test_nothing_is_dropped_where_nothing_is_alike() -> None:
    assert joined(["abc", "def"], ["ghi", "xyz"], 1) == ["abc", "def", "ghi", "xyz"]
    assert joined(["abc"], [], 1) == ["abc"]
    assert joined([], ["abc"], 1) == ["abc"]


def test_pieces_know_where_their_lines_are_from() -> None:
    found = join_pieces(["\na\nb\n", "", "c\n\nd"], [0, 0, 0])
    assert found == [Line("a", 0, 1), Line("b", 0, 2), Line("c", 2, 0), Line("", 2, 1), Line("d", 2, 2)]
    assert [line.text for line in join_pieces(["Tea 1\nMilk 2", "Milk 2\nBread 3"], [0, 0.5])] == [
        "Tea 1",
        "Milk 2",
        "Bread 3",
    ]
