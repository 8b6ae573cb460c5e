"""Tree edit distance based similarity of two tables (Zhong et al. 2019, arXiv:1911.10683).

    TEDS = 1 - distance / nodes of the larger tree

A table is a tree of rows and cells. Deleting or inserting a node costs 1; turning one into another costs 1 when their kinds or
spans differ, else for cells the edits between their texts over the length of the longer one. As in the published script, the
table itself is not counted as a node. Heads, bodies and head cells are taken for plain rows and cells, as OmniDocBench does.
apted computes the distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from kaminari_core.evaluation.extra import need
from kaminari_core.evaluation.tables import Cell, Table


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of a table's tree: the table, a row or a cell."""

    kind: str
    children: tuple[Node, ...] = ()
    cell: Cell | None = None


class _Costs:
    """apted's cost model."""

    valuecls = float

    def delete(self, node: Node) -> float:
        return 1.0

    def insert(self, node: Node) -> float:
        return 1.0

    def rename(self, node1: Node, node2: Node) -> float:
        ours, theirs = node1.cell, node2.cell
        if node1.kind != node2.kind:
            return 1.0
        if ours is None or theirs is None:
            return 0.0
        if (ours.columns, ours.rows) != (theirs.columns, theirs.rows):
            return 1.0
        return float(need("rapidfuzz.distance").Levenshtein.normalized_distance(ours.text, theirs.text))

    def children(self, node: Node) -> tuple[Node, ...]:
        return node.children


def teds(read: Table, truth: Table) -> float:
    """The similarity of two tables, 0 to 1; 1 for two without a row. Raises UsageError when the extra is missing."""
    if read == truth:
        return 1.0
    size = max(_size(read), _size(truth))
    distance = need("apted").APTED(_tree(read), _tree(truth), _Costs()).compute_edit_distance()
    return max(0.0, 1.0 - float(distance) / size)


def score_tables(read: list[Table], truths: list[Table]) -> tuple[float, int]:
    """The sum of similarities of tables taken in order, and their number; one without a partner counts 0."""
    pairs = list(zip_longest(read, truths))
    return sum(teds(ours, theirs) for ours, theirs in pairs if ours and theirs), len(pairs)


def _tree(table: Table) -> Node:
    rows = (Node("tr", tuple(Node("td", cell=cell) for cell in row)) for row in table.rows)
    return Node("table", tuple(rows))


def _size(table: Table) -> int:
    return sum(1 + len(row) for row in table.rows)
