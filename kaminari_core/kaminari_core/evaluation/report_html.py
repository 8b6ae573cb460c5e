"""An evaluation as one HTML file that needs nothing else: figures, and the worst pages with their picture and what differs.

Pictures lie in the file as data: URLs, reduced; there is no script, and nothing is fetched.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from pathlib import Path
from string import Template

from kaminari_core.config import EngineConfig
from kaminari_core.errors import ImageError
from kaminari_core.evaluation.difference import difference
from kaminari_core.evaluation.report import summary, worst
from kaminari_core.evaluation.run import Evaluation, Read
from kaminari_core.evaluation.tables import plain
from kaminari_core.evaluation.text_score import text_lines

SIDE = 900
"""The longer side of a picture in the report, in pixels, at most."""

_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
 body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1a1a1a; }
 table { border-collapse: collapse; margin: 1rem 0; } td, th { border: 1px solid #ccc; padding: .2rem .6rem; text-align: left; }
 section { border-top: 1px solid #ccc; padding: 1rem 0; } .both { display: flex; gap: 1.5rem; flex-wrap: wrap; }
 img { max-width: 28rem; max-height: 40rem; border: 1px solid #ccc; } pre { white-space: pre-wrap; flex: 1 1 20rem; margin: 0; }
 del { background: #ffd9d9; text-decoration: none; } ins { background: #cdeccd; text-decoration: none; }
 .key { color: #555; }
</style>
<h1>$title</h1>
$tables
<h2>Worst pages</h2>
<p class="key">$count. <del>Red stands on the page and was not read</del>, <ins>green was read and does not stand there</ins>;
a mark &#9166; is a line end that is missing or too much.</p>
$pages
</html>
""")


def as_html(evaluation: Evaluation, files: Mapping[str, Path], count: int) -> str:
    """The report with the `count` worst pages; `files` are the pictures by page."""
    shown = worst(evaluation.pages, count)
    title = f"{evaluation.model}, {evaluation.checkpoint}, task {evaluation.task}"
    _, _, rest = summary(evaluation).partition("\n")
    if shown:
        said = f"The {len(shown)} pages of {len(evaluation.pages)} that were read worst"
    else:
        said = f"All {len(evaluation.pages)} pages were read without a fault"
    return _PAGE.substitute(
        title=html.escape(title),
        tables=_tables(rest),
        count=said,
        pages="\n".join(_section(read, files[read.page]) for read in shown),
    )


def _section(read: Read, file: Path) -> str:
    facts = [read.status, f"{read.tokens} tokens", f"{read.visual_tokens} visual tokens", f"ended by {read.finish}"]
    if read.score.text is not None:
        facts.insert(0, f"CER {read.score.text.cer:.1%}")
    if read.score.fields is not None:
        facts.append(f"field F1 {read.score.fields.f1:.2f}")
    if read.score.tables:
        facts.append(f"TEDS {read.score.teds / read.score.tables:.2f}")
    failure = f"<p>{html.escape(read.error)}</p>" if read.error else ""
    return (
        f"<section><h3>{html.escape(read.page)}</h3><p class='key'>{html.escape(', '.join(facts))}</p>{failure}"
        f"<div class='both'>{_picture(file)}<pre>{_difference(read)}</pre></div></section>"
    )


def _difference(read: Read) -> str:
    if read.truth is None:
        return html.escape(read.text)
    marks = {"equal": "{}", "missing": "<del>{}</del>", "extra": "<ins>{}</ins>"}
    ours, theirs = ("\n".join(text_lines(plain(text))) for text in (read.text, read.truth))
    parts = []
    for piece in difference(ours, theirs):
        text = html.escape(piece.text)
        if piece.kind != "equal":
            text = text.replace("\n", "&#9166;\n")
        parts.append(marks[piece.kind].format(text))
    return "".join(parts)


def _picture(file: Path) -> str:
    from kaminari_core.images import open_picture

    try:
        image = open_picture(file.read_bytes(), file.name, EngineConfig()).image
    except ImageError as error:
        return f"<p>{html.escape(str(error))}</p>"
    image.thumbnail((SIDE, SIDE))
    encoded = io.BytesIO()
    image.save(encoded, "PNG" if image.width * image.height < 100_000 else "JPEG")
    data = base64.b64encode(encoded.getvalue()).decode()
    kind = "png" if image.width * image.height < 100_000 else "jpeg"
    return f"<img alt='{html.escape(file.name, quote=True)}' src='data:image/{kind};base64,{data}'>"


def _tables(markdown: str) -> str:
    """The tables and lists of a summary as HTML."""
    blocks = []
    for block in markdown.strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("|"):
            rows = [[html.escape(cell.strip()) for cell in line.strip("|").split("|")] for line in lines]
            del rows[1]
            body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
            blocks.append(f"<table>{body}</table>")
        else:
            blocks += [f"<p>{html.escape(line)}</p>" for line in lines]
    return "\n".join(blocks)
