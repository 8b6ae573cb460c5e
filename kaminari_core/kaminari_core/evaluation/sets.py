"""From a directory to the samples of a set, in whichever layout it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from kaminari_core.errors import UnknownNameError, UsageError
from kaminari_core.evaluation.layouts import cord, funsd, ocrbench, omnidocbench, pairs, sroie
from kaminari_core.evaluation.sample import Sample


class Layout(NamedTuple):
    """How a layout is known and read, and what its description is."""

    matches: Callable[[Path], bool]
    read: Callable[[Path], list[Sample]]
    summary: str


LAYOUTS: Final[Mapping[str, Layout]] = MappingProxyType(
    {
        "omnidocbench": Layout(omnidocbench.matches, omnidocbench.read, "OmniDocBench.json and images"),
        "funsd": Layout(funsd.matches, funsd.read, "annotations/*.json and images"),
        "cord": Layout(cord.matches, cord.read, "json/*.json and image"),
        "sroie": Layout(sroie.matches, sroie.read, "img, box and key or entities"),
        "pairs": Layout(pairs.matches, pairs.read, "truths.json, or a .txt or .json beside each picture"),
        "ocrbench": Layout(ocrbench.matches, ocrbench.read, "a .json or .jsonl of question, answers, image_path"),
    }
)


def read_set(folder: Path, layout: str | None = None) -> list[Sample]:
    """The samples of a directory. Without the name of a layout, the first one that matches is taken.

    Raises UsageError for what is no set, and for a truth whose picture is not there.
    """
    if not folder.is_dir():
        raise UsageError(f"the set {folder} is no directory")
    if layout is not None and layout not in LAYOUTS:
        raise UnknownNameError(f"there is no layout {layout!r}; choose one of: {', '.join(LAYOUTS)}")
    fits = [name for name in LAYOUTS if layout in (None, name) and LAYOUTS[name].matches(folder)]
    if not fits:
        known = "; ".join(f"{name} ({LAYOUTS[name].summary})" for name in ([layout] if layout else LAYOUTS))
        raise UsageError(f"the set {folder} has no pages in a layout that is known: {known}")
    samples = LAYOUTS[fits[0]].read(folder)
    if not samples:
        raise UsageError(f"the set {folder} has no pages, though it is laid out as {fits[0]}")
    for sample in samples:
        if not sample.file.is_file():
            raise UsageError(f"the set {folder} ({fits[0]}) names {sample.name!r}, which is not there")
    return samples
