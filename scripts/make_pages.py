"""Seeded generator of printed pages with their truths: lines, receipts, forms, tables, text, and damaged copies of them.

    python scripts/make_pages.py                                     what tests and documents show, as it is in the repository
    python scripts/make_pages.py --set DIR --pages receipt=8 form=4  a set for `kaminari eval --set DIR`
    python scripts/make_pages.py --set DIR --damage blur,jpeg        the same with damaged copies of each page

The parts are in `pages`; their names that trainers and tests use are here. Equal seeds give equal pages with equal versions of
Pillow and of the fonts, which are Debian's fonts-dejavu-core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from pages.damage import DAMAGES
from pages.drawing import Picture, Row, Style, draw_line, draw_receipt, draw_rows, draw_style, sample_receipt
from pages.kinds import KINDS, Page, draw_long_receipt, draw_page
from pages.sets import truth_of, write_lines, write_pages
from pages.words import CHARACTERS, Words, is_held_out

__all__ = [
    "CHARACTERS",
    "DAMAGES",
    "KINDS",
    "Page",
    "Picture",
    "Row",
    "Style",
    "Words",
    "draw_line",
    "draw_long_receipt",
    "draw_page",
    "draw_receipt",
    "draw_rows",
    "draw_style",
    "is_held_out",
    "sample_receipt",
    "truth_of",
    "write_lines",
    "write_pages",
]

PAGES = ("line=8", "receipt=4", "form=4", "table=4", "text=4")


def main() -> None:
    """Write a set of pages or, without --set, the lines that tests read and the receipt that the documentation shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, default=Path("tests/qwen3vl/data/lines"))
    parser.add_argument("--receipt", type=Path, default=Path("assets/receipt.png"))
    parser.add_argument("--set", type=Path, dest="folder", help="write a set there instead")
    parser.add_argument("--pages", nargs="+", default=PAGES, metavar="KIND=N", help=f"kinds: {', '.join(KINDS)}")
    parser.add_argument("--damage", default="", metavar="NAME,NAME", help=f"of {', '.join(DAMAGES)}, or all")
    parser.add_argument("--seed", type=int, default=2026)
    options = parser.parse_args()
    if options.folder:
        damages = list(DAMAGES) if options.damage == "all" else [name for name in options.damage.split(",") if name]
        counts = {kind: int(count) for kind, _, count in (pair.partition("=") for pair in options.pages)}
        if unknown := (counts.keys() - KINDS.keys()) | (set(damages) - DAMAGES.keys()):
            parser.error(f"there is no {', '.join(sorted(unknown))}")
        write_pages(options.folder, counts, options.seed, damages)
        return
    write_lines(options.lines, 60, 30, options.seed)
    options.receipt.parent.mkdir(parents=True, exist_ok=True)
    receipt = sample_receipt()
    Image.fromarray(receipt.pixels).save(options.receipt, optimize=True)
    options.receipt.with_suffix(".txt").write_text(receipt.text + "\n")


if __name__ == "__main__":
    main()
