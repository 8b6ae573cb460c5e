"""Writes the tables of docs/performance.md from the JSON in benchmarks/results/, so that no figure is copied by hand.

Usage: python scripts/make_performance_docs.py

The document has a pair of markers per file, `<!-- results:NAME -->` and `<!-- /results -->`; what is between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- results:(?P<name>[\w.-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def rendered(document: str) -> str:
    """The document with every section written anew. Raises FileNotFoundError for a section whose JSON is missing."""

    def section(match: re.Match[str]) -> str:
        result = json.loads((RESULTS / f"{match['name']}.json").read_text(encoding="utf-8"))
        kind = next(kind for key, kind in KINDS.items() if key in result)
        return f"{match[1]}\n{kind(result)}\n\n{_provenance(result)}\n\n{match[3]}"

    return SECTION.sub(section, document)


def _bench(result: dict[str, Any]) -> str:
    lines = []
    for one in result["results"]:
        accepted = "" if one["acceptance"] is None else f"{one['acceptance']:.0%}"
        lines.append(
            f"| {one['contender']} | {one['rows']} | {one['tokens_per_s']:.2f} | {one['ratio']:.2f} "
            f"| {one['ttft'] * 1000:.0f} | {one['spread']:.0%} | {accepted} |"
        )
    return _table(["contender", "rows", "tokens/s", "ratio", "TTFT ms", "spread", "drafts accepted"], lines)


def _length_buckets(result: dict[str, Any]) -> str:
    ratios = result["ratio_to_short_cache"]
    lines = [f"| {name} | {value:.2f} | {ratios[name]:.2f} |" for name, value in result["ms_per_token"].items()]
    return _table([f"{result['settings']['live']} live tokens in a", "ms/token", "ratio"], lines)


def _load(result: dict[str, Any]) -> str:
    size, peak = result["checkpoint_bytes"] / 1e9, result["peak_resident"] / 1e9
    heads = ["checkpoint GB", "shards", "peak memory of the process GB", "ratio"]
    return _table(heads, [f"| {size:.2f} | {result['shards']} | {peak:.2f} | {result['ratio']:.2f} |"])


def _table(heads: list[str], lines: list[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "| " + " | ".join("---" for _ in heads) + " |", *lines])


def _provenance(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    cores = f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
    packages = f"torch {versions['torch']}, transformers {versions['transformers']}"
    return f"`{result['command']}`\n\n{cores}, load {machine['load']:.1f} at the end; {packages}."


KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ratio_to_short_cache": _length_buckets,
    "peak_resident": _load,
    "results": _bench,
}
"""Which table a result is, by a key that only its kind has."""


def main() -> None:
    """Update the document in place."""
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
