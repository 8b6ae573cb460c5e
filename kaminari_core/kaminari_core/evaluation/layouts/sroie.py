"""SROIE (ICDAR 2019): receipts in `img`, their lines in `box`, their four fields in `key` or `entities`.

A line of `box` is eight numbers, the corners of a box clockwise from the upper left one, and a text, which may have commas. The
fields (`company`, `date`, `address`, `total`) are a JSON object, whatever the file's ending. There may be `train` and `test`.
"""

from __future__ import annotations

from pathlib import Path

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.fields import flatten
from kaminari_core.evaluation.layouts.files import pictures, read_json, read_text
from kaminari_core.evaluation.layouts.lines import Box, box_around, text_of
from kaminari_core.evaluation.sample import Sample

PARTS = ("", "data", "train", "test")


def matches(folder: Path) -> bool:
    """Whether there is a directory `img` beside `box`."""
    return bool(_parts(folder))


def read(folder: Path) -> list[Sample]:
    """The receipts, grouped by the part they are in. Raises UsageError for a picture without lines, and lines that are none."""
    samples = []
    for part in _parts(folder):
        for picture in pictures(folder / part / "img"):
            lines = _beside(folder / part, ("box",), picture.stem)
            if lines is None:
                raise UsageError(
                    f"{picture} has no lines: there is no {picture.stem}.csv or .txt in {folder / part / 'box'}"
                )
            fields = _beside(folder / part, ("key", "entities"), picture.stem)
            name = f"{part}/{picture.name}" if part else picture.name
            text = text_of(_boxes(lines))
            samples.append(Sample(name, picture, text, fields=flatten(read_json(fields)) if fields else {}, group=part))
    return samples


def _parts(folder: Path) -> list[str]:
    return [part for part in PARTS if (folder / part / "img").is_dir() and (folder / part / "box").is_dir()]


def _beside(folder: Path, kinds: tuple[str, ...], stem: str) -> Path | None:
    paths = [folder / kind / (stem + ending) for kind in kinds for ending in (".csv", ".txt", ".json")]
    return next((path for path in paths if path.is_file()), None)


def _boxes(file: Path) -> list[Box]:
    boxes = []
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        *corners, text = line.split(",", 8)
        try:
            numbers = [float(value) for value in corners]
            boxes.append(box_around(text, zip(numbers[::2], numbers[1::2], strict=True)))
        except ValueError:
            numbers = []
        if len(numbers) != 8:
            raise UsageError(f"{file}, line {number} is not eight numbers and a text: {line[:60]!r}")
    return boxes
