"""A plugin whose model does what its prompt says: `decode hang`, `prefill exit`, ... or echoes it.

A fault in decode comes a few steps after its request has begun. `once PATH STAGE FAULT` does it only while there is no file
PATH, which it makes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError
from kaminari_core.flow import Embedded, Prepared, Request, TextPart
from kaminari_core.hookspecs import hookimpl
from kaminari_core.protocols import Cache, LayerCall, Step
from kaminari_core.specs import ModelSpec
from kaminari_core.testing import EchoModel, TinyModel

FOREVER = 1000


def hang_with_the_lock() -> None:
    # PyDLL, unlike CDLL, keeps the interpreter's lock during the call.
    ctypes.PyDLL(None).sleep(FOREVER)


def hang_without_the_lock() -> None:
    time.sleep(FOREVER)


def fail() -> None:
    raise RuntimeError("as asked")


FAULTS: Mapping[str, Callable[[], object]] = {
    "lock": hang_with_the_lock,
    "hang": hang_without_the_lock,
    "exit": lambda: os._exit(3),
    "raise": fail,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Faulty(EchoModel):
    """An EchoModel that takes 5 ms for a step and obeys the prompt."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._fault, self._steps = "", 0

    def prepare(self, request: Request) -> Prepared:
        self._obey(request, "prepare")
        return super().prepare(request)

    def embed(self, prepared: Prepared) -> Embedded:
        self._obey(prepared.request, "prefill")
        match _words(prepared.request):
            case ["decode", fault]:
                self._fault, self._steps = fault, 5
        return super().embed(prepared)

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
        time.sleep(0.005)
        self._steps -= 1
        if self._fault and self._steps < 0:
            fault, self._fault = self._fault, ""
            if fault == "break":
                # What the loop does about a failed step fails as well, so the engine thread ends.
                cache.keys = "gone"  # type: ignore[assignment]
                fail()
            FAULTS[fault]()
        return super().decode(step, cache, layer_call)

    def _obey(self, request: Request, stage: str) -> None:
        match _words(request):
            case [named, fault] if named == stage:
                FAULTS[fault]()
            case ["once", path, named, fault] if named == stage and not Path(path).exists():
                Path(path).touch()
                FAULTS[fault]()


def _words(request: Request) -> list[str]:
    return " ".join(part.text for part in request.messages[-1].parts if isinstance(part, TextPart)).split()


def load(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Any) -> Faulty:
    progress("load", 1, 1)
    match (checkpoint / "order").read_text().split() if (checkpoint / "order").exists() else []:
        case ["refuse"]:
            raise CheckpointError("the checkpoint is damaged, as asked")
        case ["die"]:
            os._exit(9)
    return Faulty(config)


def load_tiny(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Any) -> TinyModel:
    return TinyModel(config)


@hookimpl
def kaminari_models() -> Iterable[ModelSpec]:
    return [
        ModelSpec(name="faulty", target="tests.supervise.faulty_plugin:load", model_types=("faulty",)),
        ModelSpec(name="tinymodel", target="tests.supervise.faulty_plugin:load_tiny", model_types=("tinymodel",)),
    ]
