"""Many pages through one engine, which may be small, slow or broken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from PIL import Image

from kaminari_core.documents.batch import BatchReader, Task
from kaminari_core.documents.document import Document, open_document
from kaminari_core.documents.pages import PageReader, PageResult, Question
from kaminari_core.engine import Engine
from kaminari_core.errors import EngineUnhealthyError
from kaminari_core.testing import TinyModel
from tests.documents.files import encode, pdf, sheet
from tests.http.serving import open_engine

PAGE = sheet("print", (96, 64))


class Broken(TinyModel):
    """Fails at every step."""

    def decode(self, *arguments: Any) -> Any:
        raise RuntimeError("no kernel image")


class Slow(TinyModel):
    """Takes 5 ms for a step."""

    def decode(self, *arguments: Any) -> Any:
        time.sleep(0.005)
        return super().decode(*arguments)


@contextmanager
def opened(kind: type[TinyModel], **settings: Any) -> Iterator[Engine]:
    with closing(open_engine(kind, **{"max_tokens": 4, **settings})) as engine:
        yield engine


def read(engine: Engine, document: Document) -> Iterator[tuple[int, PageResult]]:
    question = Question(task="ocr", prompt="read", max_tokens=engine.config.max_tokens)
    reader = PageReader(question, engine.config, engine.shape)
    tasks = (Task(number, document, number) for number in range(1, document.pages + 1))
    return BatchReader(engine, reader).read(tasks)


def test_every_page_once_also_with_a_short_queue_and_pages_of_many_pieces() -> None:
    tall = Image.new("L", (200, 8000), 250)
    for top in range(0, 8000, 40):
        tall.paste(PAGE.crop((0, 8, 96, 32)), (0, top))
    with opened(TinyModel, slots=2, queue=1) as engine:
        document = open_document(
            encode(tall, "TIFF", save_all=True, append_images=[PAGE] * 5), "scan.tif", engine.config
        )
        results = dict(read(engine, document))
        assert sorted(results) == [1, 2, 3, 4, 5, 6]
        assert {result.status for result in results.values()} == {"read"}
        assert len(results[1].pieces) == len(results[1].results) > 2
        assert results[1].usage.completion_tokens == 4 * len(results[1].pieces)
        assert len({results[number].text for number in range(2, 7)}) == 1
        assert engine.stats().finished == {"length": len(results[1].pieces) + 5}


def test_an_engine_that_serves_nothing_ends_the_run() -> None:
    with opened(Broken) as engine:
        document = open_document(pdf(*[PAGE] * 40), "scan.pdf", engine.config, dpi=72)
        failed: list[PageResult] = []
        with pytest.raises(EngineUnhealthyError):
            failed.extend(result for _, result in read(engine, document))
        assert engine.stats().running == 0


def test_leaving_early_cancels_what_is_in_work() -> None:
    with opened(Slow, slots=2, max_length=2048, max_tokens=1500) as engine:
        document = open_document(pdf(sheet(size=(96, 64)), *[PAGE] * 8), "scan.pdf", engine.config, dpi=72)
        results = read(engine, document)
        assert next(results)[1].status == "blank"
        results.close()  # type: ignore[attr-defined]
        assert set(engine.stats().finished) <= {"cancelled"}
        assert engine.stats().slots_busy == 0
