"""How the loop guard tells loops from pages that repeat themselves: false stops on true documents, and what a loop costs.

    PYTHONPATH=scripts python benchmarks/loops.py --json benchmarks/results/loops.json

True documents are `--documents` pages of the generator (their text, and tables as HTML) and as many pages made to be mistaken:
equal rows, dotted leaders, equal prices, blank tables, ruled lines. Loops are documents that are broken off anywhere and then
repeat a unit, their own last words or something made up, until `--limit` tokens. Everything is told to the guard twice, with a
token per byte, as the bundled readers have it, and with a token per word or run of marks, as in vocabularies of real size.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kaminari_core.bench import machine_facts, versions
from kaminari_core.evidence.loops import BLANK_ROWS, COPIES, LONGEST, ONE_LINE, ROWS, LoopGuard
from pages.drawing import draw_style
from pages.kinds import KINDS, draw_long_receipt, draw_page
from pages.words import Words

PIECES = re.compile(r"\s?[^\W_]{1,6}|<\w+>|</\w+>|[^\w\s]{1,8}|_{1,16}|\s{1,8}")
TOKENS: dict[str, Callable[[str], list[bytes]]] = {
    "bytes": lambda text: [bytes([byte]) for byte in text.encode()],
    "words": lambda text: [piece.encode() for piece in PIECES.findall(text)],
}
WORDS = "milk bread oil tea rice salt soap card pen total net gross item count price Berlin Lagos Quito Osaka".split()


def ids(tokens: Sequence[bytes]) -> list[int]:
    """A number for each distinct token."""
    table: dict[bytes, int] = {}
    return [table.setdefault(token, len(table)) for token in tokens]


def watch(tokens: Sequence[bytes]) -> tuple[LoopGuard, int]:
    """Tell a guard the tokens until it finds a loop; returns it and how many it was told."""
    guard = LoopGuard()
    for count, (number, token) in enumerate(zip(ids(tokens), tokens, strict=True), 1):
        guard.push(number, token)
        if guard.found is not None:
            return guard, count
    return guard, len(tokens)


def generated_documents(count: int) -> Iterator[tuple[str, str]]:
    """Kind and text of the generator's pages, tables as HTML every second time, and long receipts with rows printed twice."""
    kinds = [kind for kind in KINDS if kind != "blank"]
    for number in range(count):
        if kinds[number % len(kinds)] == "long" and number % 2:
            random = np.random.default_rng(number)
            page = draw_long_receipt(Words(random, held_out=True), draw_style(random), random, repeats=8)
            yield "long, rows printed twice", page.picture.text
            continue
        page = draw_page(kinds[number % len(kinds)], number)
        yield page.kind, page.tables[0] if page.tables and number % 2 else page.picture.text


def misleading_documents(count: int, random: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Kind and text of pages that repeat themselves as far as paper goes."""
    kinds = list(_MISLEADING)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        yield kind, _MISLEADING[kind](random)


def loops(count: int, limit: int, random: np.random.Generator) -> Iterator[tuple[str, str]]:
    """Where a loop comes from, and a text that begins as a document and then repeats itself for `limit` characters and more."""
    texts = [text for _, text in generated_documents(60)]
    for number in range(count):
        text = texts[int(random.integers(len(texts)))]
        start = text[: int(random.integers(0, len(text)))]
        size = int(np.exp(random.uniform(0, np.log(250))))
        kind = ("own words", "made up", "leader", "blank cells")[number % 4]
        if kind == "own words":
            unit = start[-size:] or "x"
        elif kind == "made up":
            unit = "".join(random.choice(list("abcdefgh 123.\n"), size))
        elif kind == "leader":
            unit = ("." * int(random.integers(1, 4)) + " ", "_", "-", ". ")[int(random.integers(4))]
        else:
            unit = "<tr>" + "<td></td>" * int(random.integers(1, 9)) + "</tr>"
        yield kind, start + unit * (4 * limit // len(unit) + 8)


def false_stops(documents: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """How many documents of each kind there are, and how many the guard would cut, for both kinds of tokens."""
    found: dict[str, Any] = {name: {"documents": 0, **dict.fromkeys(TOKENS, 0)} for name, _ in documents}
    for kind, text in documents:
        found[kind]["documents"] += 1
        for name, cut in TOKENS.items():
            found[kind][name] += watch(cut(text))[0].found is not None
    return found


def stops(cases: Sequence[tuple[str, str]], limit: int) -> dict[str, Any]:
    """For each kind of loop and of tokens: the share that ends, and the tokens from the loop's first repeat to its end."""
    cost: dict[str, dict[str, list[int | None]]] = {}
    for kind, text in cases:
        for name, cut in TOKENS.items():
            guard, told = watch(cut(text)[:limit])
            ended = None if guard.found is None else told - guard.found.kept
            cost.setdefault(kind, {}).setdefault(name, []).append(ended)
    return {
        kind: {
            name: {
                "loops": len(values),
                "ended": sum(value is not None for value in values),
                "tokens_median": statistics.median([value for value in values if value is not None]),
                "tokens_most": max(value for value in values if value is not None),
            }
            for name, values in by_tokens.items()
        }
        for kind, by_tokens in cost.items()
    }


def seconds_per_token(text: str, rounds: int = 5) -> float:
    """The least processor time that the guard takes for a token of a text, a token per byte."""
    tokens = TOKENS["bytes"](text)
    times = []
    for _ in range(rounds):
        begun = time.process_time()
        _, told = watch(tokens)
        times.append((time.process_time() - begun) / told)
    return min(times)


def _equal_rows(random: np.random.Generator) -> str:
    row = f"{_word(random)} {_word(random)} {random.integers(1, 99)}.{random.integers(10, 99)}"
    return "\n".join([_word(random), *[row] * int(random.integers(3, 13)), "Total 12.00"])


def _equal_table_rows(random: np.random.Generator) -> str:
    columns = int(random.integers(2, 13))
    row = "<tr>" + "".join(f"<td>{_word(random)}</td>" for _ in range(columns)) + "</tr>"
    return "<table>" + row * 3 + "<tr><td>Sum</td></tr></table>"


def _leaders(random: np.random.Generator) -> str:
    mark = (".", ". ", " .", "\u2026", "-", "_")[int(random.integers(6))]
    lines = [f"{_word(random)} {_word(random)} {mark * int(random.integers(10, 100))} {page}" for page in range(1, 30)]
    return "\n".join(lines)


def _equal_prices(random: np.random.Generator) -> str:
    price = f"{random.integers(0, 20)}.{random.integers(10, 99)}"
    return "\n".join([price] * int(random.integers(3, 60)))


def _equal_cells(random: np.random.Generator) -> str:
    columns, rows = int(random.integers(2, 9)), int(random.integers(3, 31))
    body = "".join(f"<tr><td>{_word(random)} {row}</td>" + "<td>0.00</td>" * columns + "</tr>" for row in range(rows))
    return f"<table>{body}</table>"


def _blank_table(random: np.random.Generator) -> str:
    columns, rows = int(random.integers(2, 6)), int(random.integers(3, 31))
    head = "".join(f"<th>{_word(random)}</th>" for _ in range(columns))
    return f"<table><tr>{head}</tr>" + ("<tr>" + "<td></td>" * columns + "</tr>") * rows + "</table>"


def _blank_markdown(random: np.random.Generator) -> str:
    columns, rows = int(random.integers(2, 9)), int(random.integers(3, 41))
    return "| a " * columns + "|\n" + "| --- " * columns + "|\n" + ("|  " * columns + "|\n") * rows


def _ruled(random: np.random.Generator) -> str:
    length, lines = int(random.integers(20, 80)), int(random.integers(2, 25))
    return f"{_word(random)}: " + "\n".join(["_" * length] * lines)


def _form(random: np.random.Generator) -> str:
    return "\n".join(f"{_word(random)}: {'_' * int(random.integers(10, 90))}" for _ in range(25))


def _matrix(random: np.random.Generator) -> str:
    size = int(random.integers(2, 13))
    return "\\begin{array}{" + "c" * size + "}" + (" & ".join("0" * size) + " \\\\ ") * size + "\\end{array}"


def _word(random: np.random.Generator) -> str:
    return str(random.choice(WORDS))


_MISLEADING: dict[str, Callable[[np.random.Generator], str]] = {
    "equal rows": _equal_rows,
    "three equal table rows": _equal_table_rows,
    "leaders": _leaders,
    "equal prices": _equal_prices,
    "equal cells": _equal_cells,
    "blank table, HTML": _blank_table,
    "blank table, Markdown": _blank_markdown,
    "ruled lines": _ruled,
    "form with underscores": _form,
    "matrix of zeros": _matrix,
}


def tables(report: dict[str, Any]) -> str:
    """The report as the tables of docs/evidence.md."""
    lines = ["| true documents | | cut, a token per byte | cut, a token per word |", "| --- | --- | --- | --- |"]
    for title in ("generated", "misleading"):
        for kind, found in report[title].items():
            lines.append(f"| {kind} | {found['documents']} | {found['bytes']} | {found['words']} |")
    lines += ["", "| loops | | ended | tokens after the first copy: median, most (per byte) | (per word) |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for kind, found in report["loops"].items():
        bytes_, words = found["bytes"], found["words"]
        ended = f"{bytes_['ended'] + words['ended']} of {bytes_['loops'] + words['loops']}"
        costs = [f"{round(each['tokens_median'])}, {each['tokens_most']}" for each in (bytes_, words)]
        lines.append(f"| {kind} | {bytes_['loops'] + words['loops']} | {ended} | {costs[0]} | {costs[1]} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--loops", type=int, default=400)
    parser.add_argument("--limit", type=int, default=8192, help="tokens at which a loop would end by itself")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random = np.random.default_rng(6)
    generated = list(generated_documents(options.documents))
    long = "\n".join(text for _, text in generated)[:20_000]
    report = {
        "what": "loop guard: false stops on true documents, and tokens until a loop ends",
        "rule": {
            "longest_period": LONGEST, "copies": COPIES,
            "characters": {"one line": ONE_LINE, "rows": ROWS, "blank rows": BLANK_ROWS},
        },
        "limit": options.limit,
        "generated": false_stops(generated),
        "misleading": false_stops(list(misleading_documents(options.documents, random))),
        "loops": stops(list(loops(options.loops, options.limit, random)), options.limit),
        "microseconds_per_token": {
            "documents": round(1e6 * seconds_per_token(long), 2),
            "blank rows": round(1e6 * seconds_per_token("<tr><td></td></tr>" * 100), 2),
        },
        "machine": machine_facts(torch.device("cpu")),
        "versions": versions(),
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text, tables(report), sep="\n")
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
