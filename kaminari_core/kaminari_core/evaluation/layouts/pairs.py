"""The plain layout: pictures with a .txt or .json of the same name beside each, or one truths.json for all of them.

    truths.json   {"a.png": "its text", "b.png": {"text": "...", "fields": {...}, "tables": ["<table>..."], "group": "form"}}
    a.txt         the text of a.png
    b.json        an object as in truths.json; one with none of its names is taken for the fields themselves

An object may also have `question` and `answers` (a text or several).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.fields import flatten
from kaminari_core.evaluation.layouts.files import pictures, read_json, read_text
from kaminari_core.evaluation.sample import Sample

TRUTHS = "truths.json"
NAMES = ("text", "question", "answers", "fields", "tables", "group")


def matches(folder: Path) -> bool:
    """Whether there is a truths.json, or a picture with a truth beside it."""
    return (folder / TRUTHS).is_file() or any(_beside(file) for file in pictures(folder))


def read(folder: Path) -> list[Sample]:
    """The pages that truths.json names, else the pictures with a truth beside them. Raises UsageError for what is none."""
    path = folder / TRUTHS
    if path.is_file():
        values = read_json(path)
        if not isinstance(values, dict):
            raise UsageError(f"{path} must be a JSON object of file names and truths")
        return [_sample(name, folder / name, truth, path) for name, truth in values.items()]
    samples = []
    for file in pictures(folder):
        truth = _beside(file)
        if truth and truth.suffix == ".txt":
            samples.append(Sample(file.name, file, read_text(truth)))
        elif truth:
            samples.append(_sample(file.name, file, read_json(truth), truth))
    return samples


def _beside(file: Path) -> Path | None:
    return next((truth for ending in (".txt", ".json") if (truth := file.with_suffix(ending)).is_file()), None)


def _sample(name: str, file: Path, truth: Any, path: Path) -> Sample:
    if isinstance(truth, str):
        return Sample(name, file, truth)
    if not isinstance(truth, dict):
        raise UsageError(f"{path}: the truth of {name!r} must be a text or an object with {', '.join(NAMES)}")
    if not truth.keys() & set(NAMES):
        return Sample(name, file, fields=flatten(truth))
    if unknown := sorted(truth.keys() - set(NAMES)):
        raise UsageError(
            f"{path}: the truth of {name!r} has {', '.join(unknown)}, but there is {', '.join(NAMES)} alone"
        )
    answers, tables = truth.get("answers", []), truth.get("tables", [])
    return Sample(
        name,
        file,
        truth.get("text"),
        truth.get("question"),
        (answers,) if isinstance(answers, str) else tuple(answers),
        flatten(truth.get("fields", {})),
        tuple(tables),
        truth.get("group", ""),
    )
