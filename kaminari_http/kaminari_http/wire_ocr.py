"""The JSON of `/v1/ocr`: a document in, what became of each of its pages out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from kaminari_core.documents.pages import PageSeen, PieceSeen, Status
from kaminari_core.evidence.facts import FieldConfidence, LineConfidence
from kaminari_core.flow import Priority
from kaminari_http.errors import ErrorBody
from kaminari_http.wire import Count, GenerateUsage, Seconds
from kaminari_http.wire_structured import Pattern, ResponseFormat

Dpi = Annotated[float, Meta(ge=10, le=2400)]


class OcrOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """How a document is to be read; a form has these fields beside its `file`. None means the default.

    `response_format`, `regex` and `strict` are as in `GenerateRequest`, for each page.
    """

    model: str | None = None
    task: str | None = None
    template: dict[str, Any] | None = None
    pages: str | None = None
    dpi: Dpi | None = None
    stream: bool | None = None
    blank_check: bool | None = None
    split: bool | None = None
    confidence: bool | None = None
    max_tokens: Count | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None
    response_format: ResponseFormat | None = None
    regex: Pattern | None = None
    strict: bool | None = None


class OcrForm(OcrOptions, kw_only=True):
    """The body of `POST /v1/ocr` as a form; for the OpenAPI document, which shows `file` as the bytes that it is."""

    file: bytes


class OcrRequest(OcrOptions, kw_only=True):
    """The body of `POST /v1/ocr` as JSON. `file` is the data: URL of a picture or PDF file, or a URL of an allowed host."""

    file: str


class PageConfidence(Struct):
    """How sure the model was of a page: the mean of its lines' means, and the least sure token of all."""

    mean: float
    minimum: float


class OcrPage(Struct, kw_only=True):
    """What became of one page. `text` is null where the page failed, and `error` says why.

    `seen` is what was decoded, `pieces` what the model saw of it: one, unless a long page was cut. `lines` and `fields` are empty
    where confidence was not asked for. `seconds` is from decoding to the end of the reply. `complete` is as in `ChoiceReport`.
    """

    page: int
    status: Status
    text: str | None
    error: ErrorBody | None
    finish_reason: str | None
    finish_detail: str | None
    usage: GenerateUsage
    confidence: PageConfidence | None
    lines: tuple[LineConfidence, ...]
    fields: tuple[FieldConfidence, ...]
    seen: PageSeen | None
    pieces: tuple[PieceSeen, ...]
    seconds: float
    complete: bool | UnsetType = UNSET


class OcrSummary(Struct, kw_only=True):
    """All pages of a request together: pages = read + blank + failed. The last event of a stream."""

    request_id: str
    model: str
    task: str
    format: str
    document_pages: int
    pages: int
    read: int
    blank: int
    failed: int
    usage: GenerateUsage
    done: Literal[True] = True


class OcrReply(Struct, kw_only=True):
    """The reply of `POST /v1/ocr` without `stream`; pages are in the order of the document."""

    summary: OcrSummary
    pages: list[OcrPage]
