"""The list of items, and how they are run: one after the other for the command, one by one as test cases."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaminari_core.check.outcome import ConformanceError, Outcome
from kaminari_core.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from kaminari_core.check.subject import Settings, Subject
    from kaminari_core.registry import Registry

logger = logging.getLogger(__name__)

Check = Callable[["Subject"], Outcome]
WITHOUT_MODEL = ("registration", "lazy import", "loading")
"""Items that say something even when the checkpoint does not load."""


@dataclass(frozen=True, slots=True)
class Case:
    """One item for one model; calling it raises ConformanceError unless it passes or does not apply."""

    name: str
    subject: Subject
    _check: Check

    def __str__(self) -> str:
        return f"{self.subject.spec.name} {self.name}"

    def __call__(self) -> Outcome:
        """Run the item. Raises ConformanceError with the failure and what it looks like."""
        outcome = self.run()
        if outcome.status == "fail":
            raise ConformanceError(f"{self}: {outcome.text}")
        return outcome

    def run(self) -> Outcome:
        """Run the item; whatever the model raises is a failure of it."""
        from kaminari_core.check.identity import load_failure
        from kaminari_core.check.outcome import failed
        from kaminari_core.check.subject import describe

        if self.name not in WITHOUT_MODEL and (reason := load_failure(self.subject)) is not None:
            return failed(f"the checkpoint does not load: {reason}")
        try:
            return self._check(self.subject)
        except Exception as error:
            logger.debug("%s", self, exc_info=error)
            return failed(f"it fails with {describe(error)}")


def items() -> dict[str, Check]:
    """Every item by name, in the order in which they are reported."""
    from kaminari_core.check import arithmetic, identity, pictures, planning, quantizing, serving

    return {
        "registration": identity.registration,
        "lazy import": identity.lazy_import,
        "loading": identity.loading,
        "configuration": identity.configuration,
        "logits": arithmetic.logits,
        "decoding": arithmetic.decoding,
        "cached prefix": arithmetic.cached_prefix,
        "chunked prefill": arithmetic.chunked_prefill,
        "slots": serving.slots,
        "buckets": serving.buckets,
        "compiled": serving.compiled,
        "quantizers": quantizing.quantizers,
        "image tokens": pictures.image_tokens,
        "end tokens": serving.end_tokens,
        "speculation": serving.speculation,
        "memory": serving.memory,
        "memory plan": planning.memory_plan,
    }


def cases(
    model: str,
    checkpoint: str | None = None,
    *,
    settings: Settings | None = None,
    registry: Registry | None = None,
    only: Sequence[str] = (),
) -> list[Case]:
    """The items for one model and checkpoint, which are as for `kaminari run`; `only` names those wanted.

    Nothing is loaded before the first case is called, and the model is loaded once for all of them. Raises KaminariError for
    names that are not there.
    """
    from kaminari_core.check.subject import Settings, Subject
    from kaminari_core.checkpoint import resolve
    from kaminari_core.quantization.manifest import is_packed, read_manifest
    from kaminari_core.registry import load_registry, selected_plugins, unknown_name

    known = items()
    for name in only:
        if name not in known:
            raise UnknownNameError(unknown_name("item", name, known))
    registry = registry or load_registry(only=selected_plugins())
    spec, folder = resolve(registry, model, checkpoint)
    if is_packed(folder):
        raise UsageError(
            f"{folder} is packed with {read_manifest(folder).quantizer}, and a check compares in full precision: give it the "
            "checkpoint that was packed; the item `quantizers` packs it and looks at the result"
        )
    subject = Subject(registry, spec, folder, settings or Settings())
    return [Case(name, subject, check) for name, check in known.items() if not only or name in only]


def run_all(found: Sequence[Case]) -> Iterator[tuple[Case, Outcome, float]]:
    """Run cases in order; yields each with what it found and the seconds it took."""
    for case in found:
        started = time.perf_counter()
        outcome = case.run()
        yield case, outcome, time.perf_counter() - started
