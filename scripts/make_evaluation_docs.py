"""Writes the tables of docs/evaluation.md from benchmarks/results/, so that no figure is copied by hand.

Usage: python scripts/make_evaluation_docs.py

The document has a pair of markers per table, `<!-- results:PATH.md -->` and `<!-- /results -->`; what is between them is replaced
by that file, its headline left out.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "evaluation.md"
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- results:(?P<path>[\w./-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
HEADLINE = re.compile(r"# .*\n+")


def rendered(document: str) -> str:
    """The document with every table written anew. Raises FileNotFoundError for one whose file is missing."""

    def section(match: re.Match[str]) -> str:
        text = (RESULTS / match["path"]).read_text(encoding="utf-8")
        return f"{match[1]}\n{HEADLINE.sub('', text, count=1).strip()}\n\n{match[3]}"

    return SECTION.sub(section, document)


def main() -> None:
    """Update the document in place."""
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
