"""CORD: receipts in `image` beside `json`, in the directory or in `train`, `dev` and `test`.

The text is that of the words' boxes, line by line. Fields are the texts of `valid_line` by category, such as `menu[0].nm` or
`total.total_price`: what belongs to a `menu` or `void_menu` is numbered by its group, in order of appearance. Words that are keys
(`is_key`) are part of the text and of no value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.layouts.files import find_picture, read_json
from kaminari_core.evaluation.layouts.lines import box_around, text_of
from kaminari_core.evaluation.sample import Sample

PARTS = ("", "train", "dev", "test")
NUMBERED = ("menu", "void_menu")


def matches(folder: Path) -> bool:
    """Whether there is a directory `json` beside `image`."""
    return bool(_files(folder))


def read(folder: Path) -> list[Sample]:
    """The receipts, grouped by the part they are in. Raises UsageError for a file that is no annotation."""
    samples = []
    for file in _files(folder):
        picture = find_picture(file.stem, [file.parent.parent / "image"], file)
        try:
            lines = read_json(file)["valid_line"]
            boxes = [_box(word) for line in lines for word in line["words"]]
            fields = _fields(lines)
        except (KeyError, TypeError) as error:
            raise UsageError(f"{file} is not as CORD is published: {error!r}") from error
        part = file.parent.parent.relative_to(folder).as_posix().removeprefix(".")
        name = f"{part}/{picture.name}" if part else picture.name
        samples.append(Sample(name, picture, text_of(boxes), fields=fields, group=part))
    return samples


def _files(folder: Path) -> list[Path]:
    return [
        file
        for part in PARTS
        if (folder / part / "image").is_dir()
        for file in sorted((folder / part / "json").glob("*.json"))
    ]


def _box(word: dict[str, Any]) -> Any:
    quad = word["quad"]
    return box_around(word["text"], [(quad[f"x{corner}"], quad[f"y{corner}"]) for corner in (1, 2, 3, 4)])


def _fields(lines: list[dict[str, Any]]) -> dict[str, str]:
    fields: dict[str, list[str]] = {}
    numbers: dict[tuple[str, Any], int] = {}
    for line in lines:
        owner, _, name = line["category"].partition(".")
        if owner in NUMBERED:
            count = sum(kind == owner for kind, _ in numbers)
            owner = f"{owner}[{numbers.setdefault((owner, line['group_id']), count)}]"
        text = " ".join(word["text"] for word in line["words"] if not word.get("is_key"))
        if text:
            fields.setdefault(f"{owner}.{name}" if name else owner, []).append(text)
    return {name: " ".join(texts) for name, texts in fields.items()}
