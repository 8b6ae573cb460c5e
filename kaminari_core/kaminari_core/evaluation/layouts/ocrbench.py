"""OCRBench and what is laid out like it: a JSON list, or a .jsonl of a line each, of questions about pictures.

    {"dataset_name": "...", "type": "...", "question": "...", "answers": "..." or ["...", ...], "image_path": "..."}

`image_path` is relative to the directory or to its `OCRBench_Images` or `images`. Pages are grouped by `type`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.layouts.files import read_json, read_text
from kaminari_core.evaluation.sample import Sample

PLACES = ("", "OCRBench_Images", "images")


def matches(folder: Path) -> bool:
    """Whether a .json or .jsonl of the directory begins with a question about a picture."""
    return _file(folder) is not None


def read(folder: Path) -> list[Sample]:
    """A page for each question. Raises UsageError for an entry without question, answers or picture."""
    file = _file(folder)
    assert file is not None, "matches has said so"
    samples = []
    for number, entry in enumerate(_entries(file)):
        if not _is_question(entry):
            raise UsageError(f"{file}: entry {number} must be an object with question, answers and image_path")
        answers, path = entry["answers"], entry["image_path"]
        places = [folder / place / path for place in PLACES]
        samples.append(
            Sample(
                f"{number:04d} {path}",
                next((place for place in places if place.is_file()), places[0]),
                question=str(entry["question"]),
                answers=tuple(map(str, answers)) if isinstance(answers, list) else (str(answers),),
                group=str(entry.get("type", "")),
            )
        )
    return samples


def _file(folder: Path) -> Path | None:
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.json")])
    return next((file for file in files if _is_question(_first(file))), None)


def _first(file: Path) -> Any:
    """The first entry of a file, None of one that is of another kind."""
    try:
        if file.suffix == ".json":
            return next(iter(_entries(file)), None)
        with file.open(encoding="utf-8-sig") as lines:
            return json.loads(next(lines, ""))
    except (UsageError, ValueError):
        return None


def _entries(file: Path) -> list[Any]:
    if file.suffix == ".json":
        values = read_json(file)
        return values if isinstance(values, list) else []
    entries = []
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if line.strip():
            try:
                entries.append(json.loads(line))
            except ValueError as error:
                raise UsageError(f"{file}, line {number} is no JSON: {error}") from error
    return entries


def _is_question(entry: Any) -> bool:
    return isinstance(entry, dict) and {"question", "answers", "image_path"} <= entry.keys()
