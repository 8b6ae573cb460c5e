"""Letting an engine read the samples of a set as `kaminari read` reads pages: blank paper is not asked about, long pages are cut.

Samples with a question of their own are asked that, in one piece and whatever is on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kaminari_core.documents.batch import BatchReader, Task
from kaminari_core.documents.document import Document, open_document
from kaminari_core.documents.pages import PageReader, PageResult, Question, Ready
from kaminari_core.engine import Engine
from kaminari_core.errors import KaminariError
from kaminari_core.evaluation.sample import Sample
from kaminari_core.protocols import Progress


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a sample."""

    sample: Sample
    page: PageResult

    @property
    def status(self) -> str:
        """`read`, `blank` (nothing was read, whether or not the model was asked) or `failed`."""
        return "blank" if self.page.status == "read" and not self.page.text.strip() else self.page.status


def read_samples(
    engine: Engine, samples: Sequence[Sample], task: str, progress: Progress, *, confidence: bool = False
) -> list[Outcome]:
    """Read samples greedily with a task of the engine's model; outcomes are in the samples' order, one for each.

    `confidence` asks for that of every line as well.
    """
    question = Question(task=task, prompt=engine.tasks[task], confidence=confidence)
    reader = SampleReader(question, engine.config, engine.model.shape, {each.name: each for each in samples})
    pages: dict[str, PageResult] = {}

    def tasks() -> Iterator[Task[str]]:
        for sample in samples:
            try:
                document = open_document(sample.file.read_bytes(), sample.name, engine.config)
            except KaminariError as error:
                pages[sample.name] = PageResult(
                    name=sample.name, page=1, pages=1, status="failed", seconds=0.0, error=error
                )
            else:
                yield Task(sample.name, document, 1)

    for name, page in BatchReader(engine, reader).read(tasks()):
        pages[name] = page
        progress("read", len(pages), len(samples))
    return [Outcome(sample, pages[sample.name]) for sample in samples]


@dataclass(frozen=True, slots=True)
class SampleReader(PageReader):
    """Makes samples ready; documents are known by their samples' names."""

    samples: Mapping[str, Sample]

    def prepare(self, document: Document, number: int) -> Ready:
        """See PageReader."""
        asked = self.samples[document.name].question
        question = self.question
        if asked is not None:
            question = replace(question, prompt=asked, blank_check=False, split=False)
        return PageReader(question, self.config, self.shape).prepare(document, number)
