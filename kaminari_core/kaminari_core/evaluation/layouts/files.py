"""What readers of several layouts do with files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kaminari_core.errors import UsageError

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".avif")


def pictures(folder: Path) -> list[Path]:
    """The picture files of a directory, by name; none when there is no such directory."""
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURES)


def read_text(path: Path) -> str:
    """A text file. Raises UsageError when it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path) -> Any:
    """A JSON file. Raises UsageError when it is none."""
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error


def find_picture(stem: str, folders: Iterable[Path], owner: Path) -> Path:
    """The picture of a truth file, by its name without ending. Raises UsageError naming the folders that lack it."""
    looked = list(folders)
    for folder in looked:
        for ending in PICTURES:
            for spelled in (ending, ending.upper()):
                if (folder / (stem + spelled)).is_file():
                    return folder / (stem + spelled)
    places = ", ".join(map(str, looked))
    raise UsageError(f"{owner} has no picture: there is no {stem}.png, .jpg or another in {places}")
