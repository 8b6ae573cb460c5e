"""OmniDocBench: `OmniDocBench.json`, a list of pages with their annotated blocks, and the pictures in `images`.

The text of a page is that of its blocks in reading order, a line each: titles, paragraphs, captions, footnotes of tables,
code, references, and formulas as LaTeX; a table stands there as plain lines and is kept as HTML as well. Headers, footers, page
numbers, page footnotes, figures, and what is marked `ignore` or has no place in the order do not count, as in its own evaluation.
That one matches blocks with blocks first; here the whole page is one text, so figures are not comparable with its leaderboard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kaminari_core.errors import UsageError
from kaminari_core.evaluation.layouts.files import read_json
from kaminari_core.evaluation.sample import Sample
from kaminari_core.evaluation.tables import parse_html

FILE = "OmniDocBench.json"
LEFT_OUT = {"header", "footer", "page_number", "page_footnote", "abandon", "figure"}


def matches(folder: Path) -> bool:
    """Whether there is an OmniDocBench.json."""
    return (folder / FILE).is_file()


def read(folder: Path) -> list[Sample]:
    """The pages, grouped by their `data_source`. Raises UsageError for an entry that is no page."""
    pages = read_json(folder / FILE)
    try:
        return [_page(folder, page) for page in pages]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder / FILE} is not as OmniDocBench is published: {error!r}") from error


def _page(folder: Path, page: dict[str, Any]) -> Sample:
    info = page["page_info"]
    name = info["image_path"]
    file = folder / "images" / Path(name).name
    blocks = [block for block in page["layout_dets"] if _counts(block)]
    blocks.sort(key=lambda block: block["order"])
    texts = [text for block in blocks if (text := _text(block))]
    tables = tuple(block["html"] for block in blocks if block["category_type"] == "table" and block.get("html"))
    group = info.get("page_attribute", {}).get("data_source", "")
    return Sample(name, file if file.is_file() else folder / name, "\n".join(texts), tables=tables, group=group)


def _counts(block: dict[str, Any]) -> bool:
    return not block.get("ignore") and block.get("order") is not None and block["category_type"] not in LEFT_OUT


def _text(block: dict[str, Any]) -> str:
    if block["category_type"] == "table" and block.get("html"):
        return parse_html(block["html"]).text
    parts = [block, *block.get("merge_list", [])] if not block.get("text") else [block]
    return "\n".join(str(part.get("text") or part.get("latex") or "") for part in parts).strip()
