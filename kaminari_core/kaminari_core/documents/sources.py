"""Paths, folders and patterns -> files, in the order a person would count them.

Names decide nothing about what a file is: its first bytes do. They only decide, inside a folder, whether a file whose content is
nothing known is a damaged page (`scan.png`) or something else that lies there (`notes.txt`); the latter is left out and named.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kaminari_core.errors import UsageError

SUFFIXES = frozenset(".png .jpg .jpeg .jpe .jfif .webp .gif .tif .tiff .bmp .dib .avif .heic .heif .hif .pdf".split())
"""Names of files that are meant to be pages."""
HEAD = 1024
"""Bytes that tell what a file is."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read. `key` is its place among the results: the path inside the folder or pattern that named it."""

    path: Path
    key: str


@dataclass(frozen=True, slots=True)
class Found:
    """The files that paths stand for, and those inside folders that are nothing to read."""

    sources: tuple[SourceFile, ...]
    left_out: tuple[str, ...]


def find_sources(paths: Sequence[str]) -> Found:
    """The files that `paths` (files, folders with all that is in them, patterns such as `scans/**/*.png`) stand for.

    Inside folders and patterns the order is natural (`page2` before `page10`), hidden files are left out, and so is what is
    neither in content nor by name a picture or a document. A file that is named twice is taken once. Raises UsageError for what
    is not there and for two files that would have one place among the results.
    """
    taken: dict[Path, SourceFile] = {}
    left_out: list[str] = []
    for path in paths:
        found = list(_expand(path, left_out))
        if not found:
            raise UsageError(f"there is nothing to read in {path!r}: it holds no picture and no document")
        for source in found:
            taken.setdefault(source.path.resolve(), source)
    _refuse_twins(list(taken.values()))
    return Found(tuple(taken.values()), tuple(left_out))


def natural_order(text: str) -> list[tuple[int, int, str]]:
    """A sort key by which numbers inside names count as numbers: `page2` comes before `page10`."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part.casefold()) for part in parts]


def printable(text: str) -> str:
    """A path as text that can be written anywhere: bytes that are no UTF-8 are shown as U+FFFD."""
    return os.fsencode(text).decode("utf-8", "replace")


def _expand(path: str, left_out: list[str]) -> Iterator[SourceFile]:
    if os.path.isdir(path):
        yield from _inside(path, sorted(_files_below(path), key=natural_order), left_out)
    elif os.path.exists(path):
        yield SourceFile(Path(path), os.path.basename(path))
    elif glob.has_magic(path):
        matches = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
        if not matches:
            raise UsageError(f"the pattern {path!r} matches no file")
        yield from _inside(_fixed_part(path), sorted(matches, key=natural_order), left_out)
    else:
        raise UsageError(f"there is no file or folder {path!r}")


def _inside(folder: str, files: Sequence[str], left_out: list[str]) -> Iterator[SourceFile]:
    for file in files:
        if Path(file).suffix.lower() in SUFFIXES or _is_known(file):
            yield SourceFile(Path(file), os.path.relpath(file, folder or "."))
        else:
            left_out.append(file)


def _files_below(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in names if not name.startswith("."))


def _fixed_part(pattern: str) -> str:
    """The folder that all matches of a pattern lie in."""
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder


def _is_known(file: str) -> bool:
    """Whether the content is that of a picture or document, accepted here or not."""
    from kaminari_core.images import sniff

    try:
        with open(file, "rb") as opened:
            return sniff(opened.read(HEAD)) not in (None, "HTML", "icon")
    except OSError:
        # Reported, with its reason, as a page that fails.
        return True


def _refuse_twins(sources: Sequence[SourceFile]) -> None:
    places: dict[str, SourceFile] = {}
    for source in sources:
        other = places.setdefault(source.key, source)
        if other is not source:
            raise UsageError(
                f"{str(other.path)!r} and {str(source.path)!r} would both be written as {source.key!r}; give the folder that "
                "holds both, or read them into two folders"
            )
