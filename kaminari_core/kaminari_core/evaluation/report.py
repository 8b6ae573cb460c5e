"""The figures of an evaluation as Markdown and as JSON."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kaminari_core.evaluation.run import Evaluation, Read
from kaminari_core.evaluation.scoring import Quality


def summary(evaluation: Evaluation) -> str:
    """All figures of an evaluation, one a line, what the set has no truth for left out."""
    quality = evaluation.quality
    lines = [f"# {evaluation.model}, {evaluation.checkpoint}, task {evaluation.task}", ""]
    lines += ["| figure | value |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in [*_quality_rows(quality), *_speed_rows(evaluation)]]
    if groups := evaluation.groups():
        lines += [
            "",
            "| group | pages | CER | exact lines | field F1 | TEDS |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_group_row(name, group) for name, group in groups.items()]
    if failed := [read for read in evaluation.pages if read.status == "failed"]:
        lines += ["", "Failed pages:", ""]
        lines += [f"* {read.page}: {read.error}" for read in failed]
    return "\n".join(lines)


def worst(pages: Sequence[Read], count: int) -> list[Read]:
    """The pages that were read worst and not without a fault, worst first: failed ones, then by share of errors."""
    faulty = [read for read in pages if _badness(read) > 0]
    return sorted(faulty, key=lambda read: (read.status == "failed", _badness(read)), reverse=True)[:count]


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Everything that is known of an evaluation, with what was read on each page."""
    return {
        **asdict(evaluation),
        "pages_per_s": evaluation.pages_per_s,
        "quality": figures(evaluation.quality),
        "groups": {name: figures(quality) for name, quality in evaluation.groups().items()},
    }


def figures(quality: Quality) -> dict[str, Any]:
    """The rates of a quality by name, None where there is no truth for them, with the counts they are made of."""
    text, fields = quality.text, quality.fields
    return {
        "pages": quality.pages,
        "read": quality.read,
        "blank": quality.blank,
        "failed": quality.failed,
        "cer": text and text.cer,
        "cer_interval": quality.interval,
        "wer": text and text.wer,
        "exact_lines": text and text.exact,
        "field_f1": fields and fields.f1,
        "values_found": fields and fields.recalled,
        "anls": quality.anls,
        "answers_contained": quality.contained,
        "teds": quality.teds,
        "counts": {
            "text": text and asdict(text),
            "fields": fields and asdict(fields),
            "tables": quality.tables,
            "tables_read": quality.tables_read,
        },
    }


def provenance(folder_name: str, samples: int) -> dict[str, Any]:
    """What a report begins with: the command, the day, the versions, the set."""
    from kaminari_core.bench import versions

    return {
        "command": shlex.join(["kaminari", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "set": {"name": folder_name, "pages": samples},
    }


def footer(machine: Mapping[str, Any]) -> str:
    """A line that says by which command, on which machine and with which versions figures came about."""
    from kaminari_core.bench import versions

    found = versions()
    where = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, load {machine['load']:.1f}"
    )
    packages = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers"))
    return f"`{shlex.join(['kaminari', *sys.argv[1:]])}`\n\n{where}; {packages}; {time.strftime('%Y-%m-%d')}."


def cer_text(quality: Quality) -> str:
    """The character error rate with its interval, for a table."""
    if quality.text is None:
        return "-"
    if not quality.text.characters:
        return f"{quality.text.inserted} characters invented"
    if quality.interval is None:
        return f"{quality.text.cer:.2%}"
    low, high = quality.interval
    return f"{quality.text.cer:.2%} ({low:.1%} to {high:.1%})"


def _quality_rows(quality: Quality) -> list[tuple[str, str]]:
    rows = [("pages", f"{quality.pages} = {quality.read} read + {quality.blank} blank + {quality.failed} failed")]
    if quality.text:
        text = quality.text
        edits = f"{text.inserted} inserted, {text.deleted} deleted, {text.substituted} substituted"
        rows += [
            ("CER (95 % interval)", cer_text(quality)),
            ("character edits", f"{text.character_edits} of {text.characters} ({edits})"),
            ("WER", f"{text.wer:.2%}"),
            ("exact lines", f"{text.exact_lines} of {text.lines} ({text.exact:.0%})"),
        ]
    if quality.fields:
        fields = quality.fields
        rows += [
            ("field F1", f"{fields.f1:.3f} ({fields.right} right, {fields.written} written, {fields.expected} there)"),
            ("values found", f"{fields.found} of {fields.expected} ({fields.recalled:.0%})"),
        ]
    rows += [("ANLS", f"{quality.anls:.3f}")] if quality.anls is not None else []
    rows += [("answers contained", f"{quality.contained:.1%}")] if quality.contained is not None else []
    if quality.teds is not None:
        rows.append(("TEDS", f"{quality.teds:.3f} ({quality.tables_read} tables written, {quality.tables} compared)"))
    return rows


def _speed_rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    return [
        ("visual tokens/page", f"{evaluation.visual_tokens:.0f}"),
        ("tokens/s", f"{evaluation.tokens_per_s:.1f}"),
        ("pages/s", f"{evaluation.pages_per_s:.2f}"),
        ("prefill", f"{evaluation.prefill * 1000:.0f} ms"),
        ("peak memory", f"{evaluation.memory / 1e6:.0f} MB"),
    ]


def _group_row(name: str, quality: Quality) -> str:
    exact = f"{quality.text.exact:.0%}" if quality.text and quality.text.lines else "-"
    fields = "-" if quality.fields is None else f"{quality.fields.f1:.2f}"
    teds = "-" if quality.teds is None else f"{quality.teds:.2f}"
    return f"| {name or '-'} | {quality.pages} | {cer_text(quality)} | {exact} | {fields} | {teds} |"


def _badness(read: Read) -> float:
    """The share of errors: of characters where there is a text, else of fields, answers and tables."""
    score = read.score
    if score.text is not None:
        return score.text.cer
    rates = [score.fields.f1] if score.fields else []
    rates += [score.anls / score.answers] if score.answers else []
    rates += [score.teds / score.tables] if score.tables else []
    return 1 - min(rates, default=1.0)
