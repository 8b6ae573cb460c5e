"""The document's figures are those that were measured, and its rule is the code's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from benchmarks.loops import false_stops, generated_documents, loops, misleading_documents, stops, tables
from kaminari_core.evidence import loops as rule
from kaminari_core.tasks import READING

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "evidence.md").read_text()
REPORT = json.loads((ROOT / "benchmarks" / "results" / "loops.json").read_text())


def test_the_tables_are_the_measured_ones() -> None:
    (shown,) = re.findall(r"<!-- loops -->\n(.*?)\n<!-- end -->", TEXT, re.DOTALL)
    assert shown == tables(REPORT)


def test_no_true_document_is_cut_and_every_loop_ends() -> None:
    for documents in (REPORT["generated"], REPORT["misleading"]):
        assert sum(found["documents"] for found in documents.values()) == 1000
        assert all(found["bytes"] == found["words"] == 0 for found in documents.values())
    for found in REPORT["loops"].values():
        assert all(each["ended"] == each["loops"] for each in found.values())


def test_the_rule_that_was_measured_is_that_of_the_code_and_of_the_text() -> None:
    assert REPORT["rule"] == {
        "longest_period": rule.LONGEST,
        "copies": rule.COPIES,
        "characters": {"one line": rule.ONE_LINE, "rows": rule.ROWS, "blank rows": rule.BLANK_ROWS},
    }
    assert [f"{rule.ONE_LINE:,} |", f"{rule.ROWS:,} |", f"{rule.BLANK_ROWS:,} |"] == re.findall(
        r"[\d,]+ \|$", TEXT, re.M
    )[:3]
    assert all(f"`{task}`" in TEXT for task in READING)


def test_a_part_of_the_measurement_still_comes_out_as_it_did() -> None:
    random = np.random.default_rng(1)
    for documents in (generated_documents(12), misleading_documents(10, random)):
        assert all(found["bytes"] == found["words"] == 0 for found in false_stops(list(documents)).values())
    for found in stops(list(loops(4, 2600, random)), 2600).values():
        assert all(each["ended"] == each["loops"] for each in found.values())
