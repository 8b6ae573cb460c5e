"""One page of a document -> engine requests -> PageResult, whoever runs the requests.

    prepare_page(document, number, ...) -> Ready: what is to be asked -> (an engine) -> Ready.finish(results) -> PageResult
                                             or an error             ->                fail(...)              -> PageResult

A page that is blank asks nothing. A long one asks once for each of its pieces (`split.py`) and joins the answers (`join.py`). The
two front ends, threads in `batch.py` and the event loop of the server, call these and nothing else, so a page is the same page
to both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kaminari_core.config import EngineConfig
from kaminari_core.documents.blank import is_blank
from kaminari_core.documents.document import Document, Sheet
from kaminari_core.documents.join import Line, join_pieces
from kaminari_core.documents.split import Piece, cut, tallest_piece
from kaminari_core.errors import DocumentError, EngineError, KaminariError
from kaminari_core.evidence.facts import FieldConfidence, LineConfidence, Source
from kaminari_core.flow import (
    FinishDetail,
    FinishReason,
    ImagePart,
    Message,
    Priority,
    Request,
    Result,
    Saw,
    TextPart,
    Usage,
)
from kaminari_core.protocols import ModelShape
from kaminari_core.structured.structure import Structure

logger = logging.getLogger(__name__)
Status = Literal["read", "blank", "failed"]
OWN_ENDS: Final[frozenset[FinishDetail]] = frozenset({"end_token", "structure_complete"})
LINE_TASKS: Final = frozenset({"ocr"})
"""Tasks whose answer is lines, so that those of a page's pieces can be joined. Of a table or a JSON object, half is no answer."""
NOTHING_USED: Final = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of each page. `task` is the name of the task that `prompt` belongs to.

    `blank_check` leaves blank pages unasked, `split` cuts long ones where the task allows it, `confidence` asks how sure the
    model is of each line. A page whose text is held to a `structure` is never cut.
    """

    task: str
    prompt: str
    blank_check: bool = True
    split: bool = True
    confidence: bool = False
    max_tokens: int | None = None
    priority: Priority = "batch"
    timeout: float | None = None
    structure: Structure | None = None

    def request(self, picture: ImagePart) -> Request:
        """The engine's request for a page or a piece of one."""
        return Request(
            (Message("user", (picture, TextPart(self.prompt))),),
            max_tokens=self.max_tokens,
            priority=self.priority,
            timeout=self.timeout,
            task=self.task,
            confidence=self.confidence,
            structure=self.structure,
        )


@dataclass(frozen=True, slots=True)
class PageSeen:
    """What was decoded: `format` of the file, size of its own pixels, `rotation` as in `flow.Saw`, and the upright `size`."""

    format: str
    decoded: tuple[int, int]
    rotation: str
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PieceSeen:
    """A part of the upright page, (left, top, width, height), and what the model saw of it; None where it is blank."""

    box: tuple[int, int, int, int]
    saw: Saw | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageResult:
    """What became of one page.

    `page` counts from 1, `pages` are those of the document. A page that is `read` has a text, which may be empty when the model
    says nothing; one that is `failed` has an `error`, and no text. `pieces` is one for the whole page unless it was cut. `lines`
    and `fields` are how sure the model was of each, and empty unless that was asked.
    """

    name: str
    page: int
    pages: int
    status: Status
    seconds: float
    text: str = ""
    error: KaminariError | None = None
    finish_reason: FinishReason | None = None
    finish_detail: FinishDetail | None = None
    usage: Usage = NOTHING_USED
    seen: PageSeen | None = None
    pieces: tuple[PieceSeen, ...] = ()
    lines: tuple[LineConfidence, ...] = ()
    fields: tuple[FieldConfidence, ...] = ()
    results: tuple[Result, ...] = ()
    """The engine's own, one for each piece that was asked for."""

    @property
    def complete(self) -> bool | None:
        """Whether the text has the structure that was asked for; None where none was, and for a page that was not asked."""
        return self.results[0].complete if self.results else None


@dataclass(frozen=True, slots=True)
class Ready:
    """A page that is decoded and looked at. `requests` has one for each piece, None for a piece that is blank."""

    name: str
    page: int
    pages: int
    seen: PageSeen
    pieces: tuple[Piece, ...]
    requests: tuple[Request | None, ...]
    began: float

    @property
    def asked(self) -> list[Request]:
        """The requests to run; none for a blank page."""
        return [request for request in self.requests if request is not None]

    def finish(self, results: Sequence[Result]) -> PageResult:
        """The page's result from those of `asked`, in their order."""
        answers = iter(results)
        of_pieces = [None if request is None else next(answers) for request in self.requests]
        if not results:
            return self._result("blank", of_pieces)
        shared = [piece.shared / (piece.bottom - piece.top) for piece in self.pieces]
        texts = ["" if result is None else result.text for result in of_pieces]
        joined = join_pieces(texts, shared)
        # What is worth knowing of the ends: the first that was not the model's own.
        end = next((each for each in results if each.finish_detail not in OWN_ENDS), results[0])
        return self._result(
            "read",
            of_pieces,
            text=texts[0] if len(texts) == 1 else "\n".join(line.text for line in joined),
            lines=_line_confidences(of_pieces, joined),
            fields=_only_fields(of_pieces),
            finish_reason=end.finish_reason,
            finish_detail=end.finish_detail,
            results=tuple(results),
        )

    def _result(
        self,
        status: Status,
        of_pieces: Sequence[Result | None],
        *,
        text: str = "",
        finish_reason: FinishReason | None = None,
        finish_detail: FinishDetail | None = None,
        lines: tuple[LineConfidence, ...] = (),
        fields: tuple[FieldConfidence, ...] = (),
        results: tuple[Result, ...] = (),
    ) -> PageResult:
        width = self.seen.size[0]
        pieces = tuple(
            PieceSeen((0, piece.top, width, piece.bottom - piece.top), None if result is None else result.saw[0])
            for piece, result in zip(self.pieces, of_pieces, strict=True)
        )
        return PageResult(
            name=self.name,
            page=self.page,
            pages=self.pages,
            status=status,
            seconds=time.monotonic() - self.began,
            text=text,
            finish_reason=finish_reason,
            finish_detail=finish_detail,
            usage=_total(results),
            seen=self.seen,
            pieces=pieces,
            lines=lines,
            fields=fields,
            results=results,
        )


@dataclass(frozen=True, slots=True)
class PageReader:
    """Makes pages ready for one engine, whose `config` and `shape` bound what is decoded and how a page is cut."""

    question: Question
    config: EngineConfig
    shape: ModelShape

    def prepare(self, document: Document, number: int) -> Ready:
        """Decode a page and decide what to ask of it.

        Raises DocumentError or ImageError for a page that cannot be read, and EngineError, logged, for what nobody foresaw.
        """
        try:
            return self._prepare(document, number)
        except KaminariError:
            raise
        except Exception as error:
            logger.exception("preparing %s, page %d, failed", document.name, number)
            raise EngineError(f"{document.name}: preparing the page failed: {type(error).__name__}: {error}") from error

    def _prepare(self, document: Document, number: int) -> Ready:
        began = time.monotonic()
        sheet = document.sheet(number)
        seen = PageSeen(sheet.format, sheet.decoded, sheet.rotation, sheet.image.size)
        pieces = self._pieces(sheet)
        requests = tuple(self._request(sheet, piece, document, number) for piece in pieces)
        return Ready(document.name, number, document.pages, seen, pieces, requests, began)

    def _pieces(self, sheet: Sheet) -> tuple[Piece, ...]:
        width, height = sheet.image.size
        wanted = self.question.split and self.question.task in LINE_TASKS and self.question.structure is None
        tallest = tallest_piece(width, height, self.shape, self.config) if wanted else None
        return (Piece(0, height),) if tallest is None else cut(sheet.image, tallest)

    def _request(self, sheet: Sheet, piece: Piece, document: Document, number: int) -> Request | None:
        whole = piece.bottom - piece.top == sheet.image.height
        box = None if whole else (0, piece.top, sheet.image.width, piece.bottom)
        if self.question.blank_check and is_blank(sheet.image if box is None else sheet.image.crop(box)):
            return None
        return self.question.request(picture_of(sheet, document, number, box))


def picture_of(
    sheet: Sheet, document: Document, number: int, box: tuple[int, int, int, int] | None = None
) -> ImagePart:
    """A page, or the part of it inside (left, top, right, bottom), as a picture that knows where it comes from."""
    name = document.name if document.pages == 1 else f"{document.name}, page {number}"
    if box is None and sheet.data is not None:
        return ImagePart(sheet.data, name)
    left, top, right, bottom = box or (0, 0, *sheet.image.size)
    crop = left, top, right - left, bottom - top
    return ImagePart(sheet.encoded(box), name, Source(sheet.decoded, sheet.rotation, crop, number, document.pages))


def fail(document: Document, page: int, error: KaminariError, seconds: float) -> PageResult:
    """The result of a page that failed."""
    return PageResult(
        name=document.name, page=page, pages=document.pages, status="failed", seconds=seconds, error=error
    )


def page_confidence(result: PageResult) -> tuple[float, float] | None:
    """How sure the model was of a page: the mean of its lines' means, and the least sure token of all. None where unknown."""
    if not result.lines:
        return None
    mean = sum(line.mean for line in result.lines) / len(result.lines)
    return mean, min(line.minimum for line in result.lines)


def check_pictures(shape: ModelShape, model: str) -> None:
    """Raise DocumentError when the model takes no pictures."""
    if shape.image_unit is None:
        raise DocumentError(
            f"the model {model!r} takes no pictures, so it reads no pages; use a vision model",
            param="model",
            code="pictures_not_supported",
        )


def _line_confidences(of_pieces: Sequence[Result | None], joined: Sequence[Line]) -> tuple[LineConfidence, ...]:
    """How sure the model was of the lines of a page, numbered as in its whole text."""
    if len(of_pieces) == 1:
        [only] = of_pieces
        return only.confidence.lines if only is not None and only.confidence is not None else ()
    known = {
        (piece, line.index): line
        for piece, result in enumerate(of_pieces)
        if result is not None and result.confidence is not None
        for line in result.confidence.lines
    }
    found = ((index, known.get((line.piece, line.index))) for index, line in enumerate(joined))
    return tuple(replace(line, index=index) for index, line in found if line is not None)


def _only_fields(of_pieces: Sequence[Result | None]) -> tuple[FieldConfidence, ...]:
    """How sure the model was of the fields of a JSON reply, which no page that was cut has."""
    only = of_pieces[0] if len(of_pieces) == 1 else None
    return only.confidence.fields if only is not None and only.confidence is not None else ()


def _total(results: Sequence[Result]) -> Usage:
    return Usage(
        sum(result.usage.prompt_tokens for result in results),
        sum(result.usage.image_tokens for result in results),
        sum(result.usage.completion_tokens for result in results),
    )
