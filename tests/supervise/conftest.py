"""A supervised engine of the faulty model, and what asks it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kaminari_core.config import EngineConfig
from kaminari_core.errors import KaminariError
from kaminari_core.flow import Delta, Event, Failed, Finished, Message, Request, Result, TextPart
from kaminari_core.progress import silent
from kaminari_core.registry import Registry, load_registry
from kaminari_core.serving import Serving
from kaminari_core.supervise.engine import SupervisedEngine
from kaminari_core.supervise.keeper import RestartPolicy
from kaminari_core.supervise.messages import Setup

PLUGINS = (("core", "kaminari_core.builtin"), ("faulty", "tests.supervise.faulty_plugin"))
STALL_SECONDS = 1.0


def registry() -> Registry:
    return load_registry([EntryPoint(name, target, "kaminari") for name, target in PLUGINS])


def ask(text: str, **options: object) -> Request:
    return Request((Message("user", (TextPart(text),)),), **{"max_tokens": 900, **options})  # type: ignore[arg-type]


class Asked:
    """A request that was submitted: what came of it so far."""

    def __init__(self, engine: Serving, request: Request) -> None:
        self.id = request.id
        self.streamed = ""
        self.end: Result | KaminariError | None = None
        self.after_the_end: list[Event] = []
        self._changed = threading.Condition()
        engine.submit(request, self._sink)

    def _sink(self, event: Event) -> None:
        with self._changed:
            if self.end is not None:
                self.after_the_end.append(event)
            match event:
                case Delta(text=text):
                    self.streamed += text
                case Finished(result=result):
                    self.end = result
                case Failed(error=error):
                    self.end = error
            self._changed.notify_all()

    def begun(self) -> Asked:
        """Itself, once it has a token."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.streamed or self.end, 30)
        return self

    def wait(self) -> Result | KaminariError:
        """Its end."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.end is not None, 60), "it never ended"
        assert self.end is not None
        assert self.after_the_end == []
        return self.end

    def text(self) -> str:
        """The reply, or the name of the error's class."""
        end = self.wait()
        if isinstance(end, Result):
            assert end.text == self.streamed, "deltas of a first try may not precede those of a second"
            return end.text
        return type(end).__name__


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


Start = Callable[..., SupervisedEngine]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts supervised engines; `order` is what the checkpoint tells the model to do when it is loaded."""
    engines: list[SupervisedEngine] = []

    def begin(
        *, policy: RestartPolicy | None = None, folder: Path | None = None, model: str = "faulty", **settings: object
    ) -> SupervisedEngine:
        folder = folder or tmp_path_factory.mktemp("checkpoint")
        (folder / "config.json").write_text(json.dumps({"model_type": model}))
        config = EngineConfig(
            **{  # type: ignore[arg-type]
                "device": "cpu", "dtype": "float32", "compile": False, "slots": 4, "max_length": 1024,
                "stall_seconds": STALL_SECONDS, **settings,
            }
        )  # fmt: skip
        setup = Setup(PLUGINS, model, str(folder), config, None, warm_up=False, threads=1, log_level=20)
        engine = SupervisedEngine(setup, silent, policy or RestartPolicy(first=0.05))
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def shared(start: Start) -> SupervisedEngine:
    """One engine for many faults: each test leaves it serving."""
    return start()


@pytest.fixture
def engine(shared: SupervisedEngine) -> Iterator[SupervisedEngine]:
    """The shared engine, which must serve before and after."""
    wait_until(lambda: shared.health().ready)
    yield shared
    assert Asked(shared, ask("after the fault")).text() == "after the fault"
    stats = shared.stats()
    assert (stats.preparing, stats.waiting, stats.running, stats.slots_busy) == (0, 0, 0, 0)
