"""What differs between a text that was read and the truth, character by character."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kaminari_core.evaluation.extra import need

Kind = Literal["equal", "missing", "extra"]


class Piece(NamedTuple):
    """A run of characters that both have, that only the truth has (`missing`) or that only the reply has (`extra`)."""

    kind: Kind
    text: str


def difference(read: str, truth: str) -> list[Piece]:
    """The pieces of both texts in order, by a shortest edit path; a substitution is a missing piece and an extra one.

    The missing and equal pieces together are the truth, the extra and equal ones what was read.
    """
    pieces: list[Piece] = []
    for step in need("rapidfuzz.distance").Levenshtein.opcodes(truth, read):
        if step.tag == "equal":
            pieces.append(Piece("equal", truth[step.src_start : step.src_end]))
            continue
        if step.src_end > step.src_start:
            pieces.append(Piece("missing", truth[step.src_start : step.src_end]))
        if step.dest_end > step.dest_start:
            pieces.append(Piece("extra", read[step.dest_start : step.dest_end]))
    return pieces
