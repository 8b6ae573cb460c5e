"""Sets of pages in a folder, as `kaminari eval --set` reads them: grey PNG files and `truths.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pages.damage import DAMAGES
from pages.drawing import Picture, draw_line, draw_style
from pages.kinds import KINDS, Page, draw_page
from pages.words import Words

Truth = str | dict[str, Any]


def truth_of(page: Page, damage: str = "") -> Truth:
    """A page's entry in `truths.json`; its group is its damage, if it has one, else its kind."""
    truth: dict[str, Any] = {"text": page.picture.text, "group": damage or page.kind}
    if page.fields:
        truth["fields"] = dict(page.fields)
    if page.tables:
        truth["tables"] = list(page.tables)
    return truth


def write_pages(folder: Path, counts: Mapping[str, int], seed: int, damages: Sequence[str] = ()) -> None:
    """Write held-out pages, so many of each kind, and each of them once more with every damage."""
    truths: dict[str, Truth] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for kind, count in counts.items():
        for index in range(count):
            page = draw_page(kind, [seed, list(KINDS).index(kind), index])
            for damage, picture in _versions(page.picture, damages, [seed, index]):
                file = f"{kind}-{index:02d}-{damage}.png".replace("-.", ".")
                Image.fromarray(picture.pixels).save(folder / file, optimize=True)
                truths[file] = truth_of(page, damage)
    _write_truths(folder, truths)


def write_lines(folder: Path, lines: int, scrambles: int, seed: int) -> None:
    """Write held-out single lines: receipt-like ones, and strings of random characters."""
    random = np.random.default_rng(seed)
    words = Words(random, held_out=True)
    truths: dict[str, Truth] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for kind, count in (("line", lines), ("random", scrambles)):
        for index in range(count):
            picture = draw_line(words.line() if kind == "line" else words.scramble(), draw_style(random), random)
            truths[f"{kind}-{index:02d}.png"] = picture.text
            Image.fromarray(picture.pixels).save(folder / f"{kind}-{index:02d}.png", optimize=True)
    _write_truths(folder, truths)


def _versions(picture: Picture, damages: Sequence[str], seed: Sequence[int]) -> Iterable[tuple[str, Picture]]:
    yield "", picture
    for name in damages:
        yield name, DAMAGES[name](picture, np.random.default_rng([*seed, list(DAMAGES).index(name)]))


def _write_truths(folder: Path, truths: Mapping[str, Truth]) -> None:
    (folder / "truths.json").write_text(json.dumps(truths, indent=1) + "\n")
