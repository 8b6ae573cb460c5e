"""Fields, answers, tables and intervals against arithmetic, and against the examples of the libraries and papers."""

from __future__ import annotations

import json

import pytest
from apted import APTED
from apted.helpers import Tree

from kaminari_core.evaluation.anls import contains, similarity
from kaminari_core.evaluation.difference import difference
from kaminari_core.evaluation.fields import FieldScore, fields_of, flatten, score_fields
from kaminari_core.evaluation.interval import bootstrap
from kaminari_core.evaluation.tables import find_tables, parse_html, plain
from kaminari_core.evaluation.teds import score_tables, teds

TABLE = "<table><tr><th>Item</th><th>Price</th></tr><tr><td>Tea</td><td>2.50</td></tr></table>"


def test_nested_values_are_named_by_their_path() -> None:
    value = {"total": 3, "paid": True, "shop": {"name": "A", "phone": ""}, "items": [{"name": "Tea"}, None], "tax": 2.5}
    expected = {"total": "3", "paid": "true", "shop.name": "A", "items[0].name": "Tea", "tax": "2.5"}
    assert flatten(value) == expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"Date": "2026-03-14", "total": 5}', {"date": "2026-03-14", "total": "5"}),
        ('Here it is:\n```json\n{"Date":  "a  b"}\n```', {"date": "a b"}),
        ("Date: 2026-03-14\nno field\nTotal:   5.00", {"date": "2026-03-14", "total": "5.00"}),
        # Of two values of a name the first is taken; a time of day is no field, a broken object is lines.
        ("Total: 1\nTOTAL: 2\n12:30", {"total": "1"}),
        ('{"a": 1\nName: x }', {'{"a"': "1", "name": "x }"}),
        ("[1, 2]", {}),
    ],
)
def test_the_fields_of_a_reply(reply: str, expected: dict[str, str]) -> None:
    assert fields_of(reply) == expected


def test_field_f1_counts_a_wrong_value_twice() -> None:
    truth = {"Date": "2026-03-14", "Total": "5.00", "Tax": "1.00"}
    score = score_fields("date: 2026-03-14\nTotal: 6.00\nShop: 1.00", truth)
    # Of three written one is right (1/3), of three there one was found by name (1/3), and the tax by its value alone.
    assert score == FieldScore(right=1, written=3, expected=3, found=2)
    assert score.f1 == pytest.approx(1 / 3)
    assert (score + score).f1 == pytest.approx(1 / 3)
    assert score_fields("", truth).f1 == 0
    assert score_fields(json.dumps(truth), truth).f1 == 1


@pytest.mark.parametrize(
    ("answer", "truths", "expected"),
    [
        ("Hello", ["hello "], 1.0),
        # One of ten letters is wrong: 1 - 1/10; of two right answers the closer one counts.
        ("abcdefghix", ["zzz", "abcdefghij"], 0.9),
        # Two of four wrong is 0.5, which still counts; three of four is below and does not.
        ("abxx", ["abcd"], 0.5),
        ("axxx", ["abcd"], 0.0),
        ("", ["abcd"], 0.0),
        ("abcd", [], 0.0),
    ],
)
def test_similarity_of_answers(answer: str, truths: list[str], expected: float) -> None:
    assert similarity(answer, truths) == pytest.approx(expected)


def test_an_answer_contains_a_truth_whatever_its_case() -> None:
    assert contains("The  total is\n5.00 EUR.", ["x", "TOTAL is 5.00"])
    assert not contains("5.00", ["15.00"])


def test_the_library_gives_the_distance_of_its_documented_example() -> None:
    # README of apted: the trees differ by one node deleted, one inserted and one renamed at most.
    one, two = Tree.from_text("{a{b}{c}}"), Tree.from_text("{a{b{d}}}")
    assert APTED(one, two).compute_edit_distance() == 2


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (TABLE, 1.0),
        # Two rows and four cells are 6 nodes. A cell one of whose four letters is wrong: 1 - (1/4) / 6.
        (TABLE.replace("2.50", "2.60"), 1 - 0.25 / 6),
        # A row of a row node and two cells is missing: 1 - 3/6.
        (TABLE.replace("<tr><td>Tea</td><td>2.50</td></tr>", ""), 0.5),
        # A cell that spans two columns in place of two: one differs in its span, one is deleted: 1 - 2/6.
        (TABLE.replace("<th>Item</th><th>Price</th>", "<th colspan=2>Item</th>"), 1 - 2 / 6),
        # Head cells, bodies and white space are not told apart; what is left open is closed.
        ("<TABLE><tbody><tr><td>Item <td> Price<tr><td><b>Tea</b><td>2.50", 1.0),
        ("| Item | Price |\n|:---|---:|\n| Tea | 2.50 |", 1.0),
    ],
)
def test_tables_against_arithmetic(read: str, expected: float) -> None:
    [table] = find_tables(read)
    assert teds(table, parse_html(TABLE)) == pytest.approx(expected)
    assert teds(parse_html(TABLE), table) == pytest.approx(expected)


def test_a_table_without_partner_counts_nothing() -> None:
    truth = parse_html(TABLE)
    assert score_tables([], [truth]) == (0, 1)
    assert score_tables([truth], [truth, truth]) == (1.0, 2)
    assert score_tables([truth, truth], [truth]) == (1.0, 2)


def test_text_is_the_same_in_whichever_notation_tables_are_written() -> None:
    markdown = "Shop\n| Item | Price |\n|---|---|\n| Tea | 2.50 |\nThanks"
    assert plain(markdown) == plain(f"Shop\n{TABLE}\nThanks") == "Shop\nItem Price\nTea 2.50\nThanks"
    # A bar or a smaller-than sign is no table.
    assert plain("a | b\n<c>\n--") == "a | b\n<c>\n--"
    assert plain(r"|a \| b|c|" + "\n|-|-|") == "a | b c"


def test_the_pieces_of_a_difference_are_both_texts() -> None:
    pieces = difference("kitten", "sitting")
    assert "".join(piece.text for piece in pieces if piece.kind != "extra") == "sitting"
    assert "".join(piece.text for piece in pieces if piece.kind != "missing") == "kitten"
    assert [piece.text for piece in pieces if piece.kind == "equal"] == ["itt", "n"]


def test_the_interval_is_that_of_resampled_pages() -> None:
    # Every page has the same rate, so every draw has.
    assert bootstrap([1] * 20, [10] * 20) == (0.1, 0.1)
    low, high = bootstrap([0, 2] * 50, [10] * 100) or (1, 0)
    # 100 pages whose edits have a standard deviation of 1: that of the rate is 0.1 / 10, so 95 % is 0.1 +- 0.0196.
    assert low == pytest.approx(0.1 - 0.0196, abs=0.003)
    assert high == pytest.approx(0.1 + 0.0196, abs=0.003)
    assert bootstrap([0, 2] * 50, [10] * 100) == (low, high)
    assert bootstrap([1], [10]) is None
