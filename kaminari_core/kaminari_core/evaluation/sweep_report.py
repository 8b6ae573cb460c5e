"""A sweep as a Markdown table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kaminari_core.evaluation.report import cer_text, figures
from kaminari_core.evaluation.sweep import Row, change, page_counts


def table(rows: Sequence[Row]) -> str:
    """A row for each configuration; figures that the set has no truth for are left out as columns."""
    first = next(row for row in rows if row.evaluation is not None)
    assert first.evaluation is not None
    quality = first.evaluation.quality
    optional = [name for name, value in (("field F1", quality.fields), ("ANLS", quality.anls)) if value is not None]
    optional += ["TEDS"] if quality.teds is not None else []
    head = [*rows[0].values, "CER (95 %)", "change (95 %)", "exact lines", *optional]
    head += ["visual tokens/page", "pages/s", "tokens/s", "peak memory MB"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [*row.values.values(), *_cells(row, rows, optional, len(head) - len(row.values))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each configuration with its figures, the edits and lengths of its pages, and its settings."""
    return [_record(row, rows) for row in rows]


def _cells(row: Row, rows: Sequence[Row], optional: Sequence[str], count: int) -> list[str]:
    evaluation = row.evaluation
    if evaluation is None:
        return [f"did not run: {row.error}".replace("|", "/"), *[""] * (count - 1)]
    quality = evaluation.quality
    rates = {"field F1": quality.fields and quality.fields.f1, "ANLS": quality.anls, "TEDS": quality.teds}
    return [
        cer_text(quality),
        _change(row, rows),
        "-" if quality.text is None else f"{quality.text.exact:.0%}",
        *[f"{rates[name] or 0:.3f}" for name in optional],
        f"{evaluation.visual_tokens:.0f}",
        f"{evaluation.pages_per_s:.2f}",
        f"{evaluation.tokens_per_s:.0f}",
        f"{evaluation.memory / 1e6:.0f}",
    ]


def _change(row: Row, rows: Sequence[Row]) -> str:
    found = change(row, rows)
    if found is None:
        return "-"
    difference, (low, high) = found
    return f"{difference:+.2%} ({low:+.1%} to {high:+.1%})"


def _record(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    evaluation = row.evaluation
    if evaluation is None:
        return {"axes": dict(row.values), "error": row.error}
    return {
        "axes": dict(row.values),
        **figures(evaluation.quality),
        "change": change(row, rows),
        "page_edits": page_counts(evaluation)[0],
        "page_characters": page_counts(evaluation)[1],
        "groups": {name: figures(quality) for name, quality in evaluation.groups().items()},
        "visual_tokens": evaluation.visual_tokens,
        "seconds": evaluation.seconds,
        "pages_per_s": evaluation.pages_per_s,
        "tokens_per_s": evaluation.tokens_per_s,
        "prefill": evaluation.prefill,
        "memory": evaluation.memory,
        "machine": evaluation.machine,
        "config": evaluation.config,
    }
