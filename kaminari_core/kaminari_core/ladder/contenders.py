"""Makes rungs runnable: loads each form of the weights once, and lets engines of different settings share it.

A rung that cannot be run on this machine, with this checkpoint or in this version is not an error of the ladder: it is kept with
the reason.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kaminari_core.checkpoint import resolve
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.errors import KaminariError, UsageError
from kaminari_core.flow import Event, Failed, Finished, Request, Result
from kaminari_core.ladder.rungs import SOURCE, Rung
from kaminari_core.launch import engine_over, load_model
from kaminari_core.protocols import Model, Progress, Reference
from kaminari_core.registry import Registry
from kaminari_core.threads import release_helpers

GATHERING = 0.2
"""Seconds in which the rows of a turn are prepared; no time that is measured contains them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One rung in one round. `seconds` is from when every row has its first token to the last end, `tokens` what all rows got
    in it, `steps` the decode steps it took; `ttft` the first row's seconds to its first token.
    """

    tokens: int
    seconds: float
    steps: int
    ttft: float
    acceptance: float | None = None


_Key = tuple[str, EngineConfig]


class Contenders:
    """Engines and the stock implementation, made once and used in turns. A context manager: engines are closed at its end."""

    def __init__(
        self,
        registry: Registry,
        model: str,
        checkpoint: str | None,
        base: EngineConfig,
        packed: Mapping[str, Path],
        progress: Progress,
    ) -> None:
        self.spec, self.folder = resolve(registry, model, checkpoint)
        # Several models are loaded at once, which no plan for one of them knows.
        self._registry, self._base, self._progress = registry, dataclasses.replace(base, plan=False), progress
        self.folders: Mapping[str, Path] = {SOURCE: self.folder, **packed}
        self._models: dict[tuple[Any, ...], tuple[Model, EngineConfig]] = {}
        self._engines: dict[_Key, Engine] = {}
        self._stock: Reference | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Contenders:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def config(self, rung: Rung) -> EngineConfig:
        """The configuration of a rung of ours. Raises UsageError for a rung that this checkpoint has no weights for."""
        if rung.form not in self.folders:
            raise UsageError(
                f"no packed directory {rung.form!r} was given: make it with `kaminari quantize` and give it with "
                f"--packed {rung.form}=DIR"
            )
        # A group starts together, so that what is decoded side by side begins when the last prompt is in.
        return dataclasses.replace(self._base, scheduler="microbatch", batch_window=GATHERING, **rung.settings)

    def _key(self, rung: Rung) -> _Key:
        """What a rung needs an engine of its own for."""
        return rung.form, self.config(rung)

    def load(self, rungs: Sequence[Rung]) -> dict[str, str]:
        """Load what the rungs need and warm it up; returns the reasons of those that cannot be run, by name."""
        refused: dict[str, str] = {}
        most: dict[_Key, int] = {}
        for rung in (rung for rung in rungs if rung.stock is None):
            try:
                key = self._key(rung)
                most[key] = max(rung.rows, most.get(key, 1))
                self.model(rung)
            except KaminariError as error:
                refused[rung.name] = str(error)
        for rung in (rung for rung in rungs if rung.stock is None and rung.name not in refused):
            try:
                self._open(rung, most[self._key(rung)])
            except KaminariError as error:
                refused[rung.name] = str(error)
        if self._models and any(rung.stock for rung in rungs):
            first = next(iter(self._models.values()))[0]
            self._stock = self.spec.load_reference()(self.folder, first.device, first.dtype)
        return refused

    def model(self, rung: Rung) -> Model:
        """The loaded model of a rung, shared by all that read the same weights with the same operators."""
        config = self.config(rung)
        key = _weights_key(rung)
        if key not in self._models:
            made = load_model(self._registry, self.spec, self.folders[rung.form], config, self._progress)
            # The newest keeps its memory, since that of own operators lies in large pages, from which all of ours then gain.
            for other, _ in self._models.values():
                share_weights(other, made[0])
            self._models[key] = made
        return self._models[key][0]

    def engine(self, rung: Rung) -> Engine:
        """The running engine of a rung that `load` made."""
        return self._engines[self._key(rung)]

    def serve(self, rung: Rung, request: Request, new_tokens: int) -> Turn:
        """Run one turn of a rung: `rows` copies of the request together, `new_tokens` each, past end tokens."""
        # The stock class computes in this thread, as loading did.
        release_helpers()
        if rung.stock is not None:
            return self._serve_stock(rung, request, new_tokens)
        engine = self.engine(rung)
        before = engine.stats().steps
        results = serve_together(engine, request, new_tokens, rung.rows)
        seconds = max(one.timings.total for one in results) - max(one.timings.ttft for one in results)
        proposed = sum(one.drafts.proposed for one in results)
        accepted = sum(one.drafts.accepted for one in results)
        return Turn(
            tokens=rung.rows * (new_tokens - 1),
            seconds=seconds,
            steps=engine.stats().steps - before,
            ttft=min(one.timings.ttft - one.timings.window for one in results),
            acceptance=accepted / proposed if proposed else None,
        )

    def _serve_stock(self, rung: Rung, request: Request, new_tokens: int) -> Turn:
        assert self._stock is not None and rung.stock is not None, "load was called"
        prepared = next(iter(self._models.values()))[0].prepare(request)
        run = self._stock.greedy(prepared, new_tokens, mode=rung.stock, max_length=self._base.max_length)
        return Turn(new_tokens - 1, run.decode_seconds, new_tokens - 1, run.prefill_seconds)

    def _open(self, rung: Rung, slots: int) -> None:
        if self._key(rung) in self._engines:
            return
        _, resolved = self._models[_weights_key(rung)]
        config = dataclasses.replace(
            self.config(rung),
            slots=slots,
            device=resolved.device,
            dtype=resolved.dtype,
            quantizer=resolved.quantizer,
            max_length=resolved.max_length,
        )
        engine = engine_over(self._registry, self.spec, self.model(rung), config, rung.name)
        if config.compile:
            engine.warm_up(self._progress)
        engine.start()
        self._opened.enter_context(closing(engine))
        self._engines[self._key(rung)] = engine


def _weights_key(rung: Rung) -> tuple[Any, ...]:
    """What a model has to be loaded again for."""
    return rung.form, rung.settings.get("kernels"), rung.settings.get("draft") == "mtp"


def serve_together(engine: Engine, request: Request, new_tokens: int, rows: int) -> list[Result]:
    """Serve copies of a request at once. Raises the error of one that failed."""
    ends: list[Result | KaminariError] = []
    done = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Finished):
            ends.append(event.result)
        elif isinstance(event, Failed):
            ends.append(event.error)
        if len(ends) == rows:
            done.set()

    for _ in range(rows):
        engine.submit(Request(request.messages, max_tokens=new_tokens, ignore_end=True), sink)
    done.wait()
    results = []
    for end in ends:
        if isinstance(end, KaminariError):
            raise end
        results.append(end)
    return results


def share_weights(model: Model, other: Model) -> None:
    """Let `model` hold the parameters of `other` where name and contents are equal, so that both take the memory of one."""
    theirs = dict(_parameters(other))
    for name, parameter in _parameters(model):
        twin = theirs.get(name)
        same = twin is not None and (twin.shape, twin.dtype) == (parameter.shape, parameter.dtype)
        if twin is not None and same and torch.equal(twin, parameter):
            parameter.data = twin.data


def _parameters(model: Model) -> list[tuple[str, nn.Parameter]]:
    networks = {name: value for name, value in vars(model).items() if isinstance(value, nn.Module)}
    return [
        (f"{owner}.{name}", parameter)
        for owner, network in networks.items()
        for name, parameter in network.named_parameters()
    ]
