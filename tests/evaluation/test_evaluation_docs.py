"""The tables of docs/evaluation.md are those of benchmarks/results, and what its text says of them is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

from make_evaluation_docs import DOCUMENT, RESULTS, SECTION, rendered


def test_the_document_shows_the_results() -> None:
    text = DOCUMENT.read_text()
    assert len(SECTION.findall(text)) == text.count("<!-- /results -->") > 5
    assert rendered(text) == text


def test_no_file_of_the_results_names_a_place_outside_the_repository() -> None:
    for file in RESULTS.glob("eval_*/*/*.json"):
        record = json.loads(file.read_text())
        assert not re.search(r"(?<![\w.-])/(home|mnt|opt|root|tmp|work|Users)/", file.read_text()), file
        assert not any(Path(word).is_absolute() for word in record.get("command", "").split())
