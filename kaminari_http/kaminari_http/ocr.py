"""`/v1/ocr`: a picture or a document in, what became of each of its pages out, whole or as an event per page.

The pages go through the same `PageReader` as those of `kaminari read`; here an event loop waits for them instead of threads. A
page that fails is a failed page among the others; a request all of whose pages fail does so with the reason of the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from kaminari_core.data_url import decode_data_url
from kaminari_core.documents.document import DEFAULT_DPI, Document, open_document
from kaminari_core.documents.pages import PageReader, PageResult, Question, check_pictures, page_confidence
from kaminari_core.documents.selection import PageSelection
from kaminari_core.errors import DocumentError
from kaminari_core.flow import Usage
from kaminari_core.serving import Serving
from kaminari_http.app import Service, json_reply, request_id, service_of
from kaminari_http.body import decode, read_json
from kaminari_http.call import unless_client_leaves
from kaminari_http.errors import failure_of
from kaminari_http.form import FILE, is_form, read_form
from kaminari_http.native import DEFAULT_TASK
from kaminari_http.ocr_job import OcrJob
from kaminari_http.requests import task_prompt
from kaminari_http.sse import FIRST_EVENT_SECONDS, EventStream, named_event
from kaminari_http.structured import structure_of_page
from kaminari_http.wire import GenerateUsage
from kaminari_http.wire_ocr import OcrOptions, OcrPage, OcrReply, OcrRequest, OcrSummary, PageConfidence


def routes() -> list[Route]:
    """The route that reads documents."""
    return [Route("/v1/ocr", read_document, methods=["POST"])]


async def read_document(request: HttpRequest) -> Response:
    """POST /v1/ocr: the text of every page of a picture, TIFF or PDF file, plain and streamed."""
    service = service_of(request)
    asked, file = await _asked(request, service)
    model = next(iter(service.engines), "") if asked.model is None else asked.model
    engine = service.engine(model)
    check_pictures(engine.shape, model)
    prompt = task_prompt(engine.tasks, asked.task or DEFAULT_TASK, asked.template)
    if isinstance(file, str):
        fetched = await service.fetch(model, [(file, FILE)])
        file = fetched[file] if file in fetched else await run_in_threadpool(decode_data_url, file, FILE)
    document, numbers = await run_in_threadpool(_open, file, asked, engine, service.config.max_pages)
    reader = PageReader(_question(asked, prompt, len(numbers)), engine.config, engine.shape)
    job = OcrJob(engine, model, reader, document, numbers, service.metrics, request_id(request))
    reply = _Reply(job, model, asked.task or DEFAULT_TASK, document, len(numbers))
    if asked.stream:
        return await _stream(request, job, reply)
    try:
        return json_reply(await unless_client_leaves(request.receive, reply.complete()))
    finally:
        job.cancel()


async def _stream(request: HttpRequest, job: OcrJob, reply: _Reply) -> Response:
    """The pages as events. Until the first of them, which may take long, nothing else listens for a client that leaves."""
    try:
        await unless_client_leaves(request.receive, job.first(FIRST_EVENT_SECONDS))
    except BaseException:
        job.cancel()
        raise
    return EventStream(job, reply.events())


async def _asked(request: HttpRequest, service: Service) -> tuple[OcrOptions, bytes | str]:
    """The options, and the file or the URL of one."""
    if is_form(request):
        return await read_form(request, OcrOptions, service.config.cors_origins)
    asked = await read_json(request, partial(decode, kind=OcrRequest))
    return asked, asked.file


def _open(file: bytes, asked: OcrOptions, engine: Serving, most: int) -> tuple[Document, list[int]]:
    """The document, and the pages of it that are wanted."""
    selection = PageSelection() if asked.pages is None else PageSelection.parse(asked.pages)
    document = open_document(file, FILE, engine.config, DEFAULT_DPI if asked.dpi is None else asked.dpi)
    numbers = selection.numbers(document.pages, FILE)
    if len(numbers) > most:
        raise DocumentError(
            f"{FILE}: {len(numbers)} pages are wanted, but a request may have at most {most} (--max-pages); ask for some of them "
            f"with pages, such as 1-{most}",
            param="pages",
            code="too_many_pages",
        )
    return document, numbers


def _question(asked: OcrOptions, prompt: str, pages: int) -> Question:
    return Question(
        task=asked.task or DEFAULT_TASK,
        prompt=prompt,
        blank_check=asked.blank_check is not False,
        split=asked.split is not False,
        confidence=asked.confidence is not False,
        max_tokens=asked.max_tokens,
        # Somebody waits for one page; a long document is to let others pass.
        priority=asked.priority or ("interactive" if pages == 1 else "batch"),
        timeout=asked.timeout,
        structure=structure_of_page(asked),
    )


@dataclass(frozen=True, slots=True)
class _Reply:
    """The answer to a request on its way."""

    job: OcrJob
    model: str
    task: str
    document: Document
    wanted: int

    async def complete(self) -> OcrReply:
        """The whole reply. Raises the error of the first page when all of them failed."""
        results = sorted([result async for result in self.job], key=lambda result: result.page)
        errors = [result.error for result in results if result.error is not None]
        if len(errors) == len(results):
            raise errors[0]
        return OcrReply(summary=self._summary(results), pages=[_page(result) for result in results])

    async def events(self) -> AsyncIterator[bytes]:
        """The stream: each page as soon as it is done, then the summary."""
        results = []
        async for result in self.job:
            results.append(result)
            yield named_event("page", _page(result))
        yield named_event("summary", self._summary(results))

    def _summary(self, results: Sequence[PageResult]) -> OcrSummary:
        assert len(results) == self.wanted, "every page that was asked for has an end"
        statuses = [result.status for result in results]
        used = [result.usage for result in results]
        total = Usage(
            sum(each.prompt_tokens for each in used),
            sum(each.image_tokens for each in used),
            sum(each.completion_tokens for each in used),
        )
        return OcrSummary(
            request_id=self.job.http_id,
            model=self.model,
            task=self.task,
            format=self.document.format,
            document_pages=self.document.pages,
            pages=len(results),
            read=statuses.count("read"),
            blank=statuses.count("blank"),
            failed=statuses.count("failed"),
            usage=_usage(total),
        )


def _page(result: PageResult) -> OcrPage:
    sure = page_confidence(result)
    return OcrPage(
        page=result.page,
        status=result.status,
        text=None if result.status == "failed" else result.text,
        error=None if result.error is None else failure_of(result.error).body,
        finish_reason=result.finish_reason,
        finish_detail=result.finish_detail,
        usage=_usage(result.usage),
        confidence=None if sure is None else PageConfidence(*sure),
        lines=result.lines,
        fields=result.fields,
        seen=result.seen,
        pieces=result.pieces,
        seconds=round(result.seconds, 6),
        complete=UNSET if result.complete is None else result.complete,
    )


def _usage(usage: Usage) -> GenerateUsage:
    return GenerateUsage(
        usage.prompt_tokens,
        usage.image_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
    )
