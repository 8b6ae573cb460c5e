"""FUNSD: noisy scanned forms, `annotations/*.json` beside `images`, in the directory or in `training_data` and `testing_data`.

The text is that of the words' boxes, line by line. A field is a question and the answers that are linked to it, joined by
spaces; a question without an answer is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.layouts.files import find_picture, read_json
from kaminari_core.evaluation.layouts.lines import Box, text_of
from kaminari_core.evaluation.sample import Sample

PARTS = ("", "training_data", "testing_data")


def matches(folder: Path) -> bool:
    """Whether there are annotations in any of the places."""
    return bool(_files(folder))


def read(folder: Path) -> list[Sample]:
    """The forms, grouped by the part they are in. Raises UsageError for a file that is no annotation."""
    samples = []
    for file in _files(folder):
        picture = find_picture(file.stem, [file.parent.parent / "images"], file)
        try:
            entities = {entity["id"]: entity for entity in read_json(file)["form"]}
            boxes = [Box(word["text"], *word["box"]) for entity in entities.values() for word in entity["words"]]
            fields = _fields(entities)
        except (KeyError, TypeError) as error:
            raise UsageError(f"{file} is not as FUNSD is published: {error!r}") from error
        part = file.parent.parent.relative_to(folder).as_posix().removeprefix(".")
        name = f"{part}/{picture.name}" if part else picture.name
        samples.append(Sample(name, picture, text_of(boxes), fields=fields, group=part))
    return samples


def _files(folder: Path) -> list[Path]:
    return [file for part in PARTS for file in sorted((folder / part / "annotations").glob("*.json"))]


def _fields(entities: dict[int, Any]) -> dict[str, str]:
    answers: dict[int, list[str]] = {}
    for entity in entities.values():
        for first, second in entity["linking"]:
            # Each link stands with both of its ends.
            if first == entity["id"] and entity["label"] == "question" and entities[second]["label"] == "answer":
                answers.setdefault(first, []).append(entities[second]["text"])
    return {entities[question]["text"]: " ".join(texts) for question, texts in answers.items()}
