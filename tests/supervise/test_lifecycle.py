"""How a supervised engine starts, gives up, drains and ends; and what its two sides send each other."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kaminari_core import errors
from kaminari_core.config import EngineConfig
from kaminari_core.errors import (
    CheckpointError,
    EngineClosedError,
    EngineError,
    KaminariError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from kaminari_core.flow import Event, Failed, Finished, Result
from kaminari_core.launch import open_engine, open_supervised
from kaminari_core.progress import silent
from kaminari_core.supervise.child import picklable
from kaminari_core.supervise.keeper import RestartPolicy
from tests.supervise.conftest import Asked, Start, ask, registry, wait_until

ROOT = Path(__file__).parents[2]


def test_what_loading_raises_is_raised(start: Start, tmp_path: Path) -> None:
    (tmp_path / "order").write_text("refuse")
    with pytest.raises(CheckpointError, match="damaged, as asked"):
        start(folder=tmp_path)


@pytest.mark.slow
def test_a_process_that_ends_while_it_loads_is_an_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "order").write_text("die")
    with pytest.raises(EngineError, match="ended with exit code 9 while it loaded"):
        start(folder=tmp_path)


def test_it_gives_up_after_failed_starts_and_says_so(start: Start, tmp_path: Path) -> None:
    engine = start(folder=tmp_path, policy=RestartPolicy(first=0.01, most_failures=1))
    (tmp_path / "order").write_text("die")
    begun = Asked(engine, ask("x" * 800)).begun()
    waiting = [Asked(engine, ask(f"{n}")) for n in range(6)]
    os.kill(engine.process_id or 0, signal.SIGKILL)
    assert begun.text() == "EngineRestartedError"
    for one in waiting:
        error = one.wait()
        assert "exit code 9" in str(error)
        assert "not started again" in str(error)
    assert engine.health().state == "failed"
    assert not engine.alive
    with pytest.raises(EngineError, match="2 times in a row"):
        engine.submit(ask("more"), lambda event: None)
    engine.close()


def test_draining_finishes_what_is_open_and_leaves_no_process(start: Start) -> None:
    engine = start()
    process = engine._keeper.child.process
    asked = [Asked(engine, ask(f"reply {n} " * 10)) for n in range(6)]
    engine.close(drain=30)
    assert [one.text() for one in asked] == [f"reply {n} " * 10 for n in range(6)]
    with pytest.raises(EngineClosedError):
        engine.submit(ask("more"), lambda event: None)
    assert process.exitcode == 0
    assert engine.health().state == "closed"


def test_refusals_are_told_at_once_and_closing_ends_what_is_open(start: Start) -> None:
    engine = start(queue=3, slots=1)
    with pytest.raises(RequestError) as caught:
        engine.submit(ask("a", max_tokens=0), lambda event: None)
    assert caught.value.param == "max_tokens"
    running = Asked(engine, ask("x" * 200)).begun()
    waiting = [Asked(engine, ask("hello")) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        engine.submit(ask("more"), lambda event: None)
    with pytest.raises(RequestError, match="already being served"):
        engine.submit(ask("twin", id=running.id), lambda event: None)
    assert [one.text() for one in [running, *waiting]] == ["x" * 200, *["hello"] * 3]
    too_long = Asked(engine, ask("y" * 2000)).wait()
    assert isinstance(too_long, RequestError)
    assert (too_long.param, too_long.code) == ("messages", "context_length_exceeded")
    # One after the other: of requests submitted together, the first to be prepared starts.
    cut = [Asked(engine, ask("x" * 900)).begun()]
    cut += [Asked(engine, ask("x" * 900)) for _ in range(2)]
    engine.close()
    assert {one.text() for one in cut} == {"EngineClosedError"}
    engine.close()


def test_closing_from_inside_a_sink(start: Start) -> None:
    engine = start()
    ended: list[Event] = []

    def sink(event: Event) -> None:
        engine.close(drain=30)
        ended.extend([event] if isinstance(event, Finished | Failed) else [])

    engine.submit(ask("hello"), sink)
    wait_until(lambda: bool(ended) and engine.health().state == "closed" and engine.process_id is None)
    assert isinstance(ended[0], Finished)
    assert ended[0].result.text == "hello"


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "faulty"}')
    program = f"""
import os
from kaminari_core.config import EngineConfig
from kaminari_core.launch import open_supervised
from kaminari_core.progress import silent
from tests.supervise.conftest import registry
engine = open_supervised(registry(), {str(tmp_path)!r}, None, EngineConfig(device="cpu", compile=False), silent)
print(engine.process_id, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    pid = int(done.stdout)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


@pytest.mark.slow
def test_a_parent_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "faulty"}')
    program = f"""
from kaminari_core.config import EngineConfig
from kaminari_core.launch import open_supervised
from kaminari_core.progress import silent
from tests.supervise.conftest import registry
engine = open_supervised(registry(), {str(tmp_path)!r}, None, EngineConfig(device="cpu", compile=False), silent)
"""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=30)
    assert time.monotonic() - began < 20


def test_replies_equal_those_of_the_plain_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "tinymodel"}')
    config = EngineConfig(device="cpu", dtype="float32", compile=False, max_length=256, slots=4)
    texts = [f"tell me of {n} " * (1 + n % 4) for n in range(12)]

    def ends(engine: object) -> Iterator[tuple[object, ...]]:
        asked = [Asked(engine, ask(text, max_tokens=20, ignore_end=True)) for text in texts]  # type: ignore[arg-type]
        for one in asked:
            end = one.wait()
            assert isinstance(end, Result)
            yield end.text, end.tokens, end.usage, end.finish_detail, one.streamed

    with closing(open_engine(registry(), str(tmp_path), None, config, silent)) as plain:
        expected = list(ends(plain))
        preview = plain.preview(ask("what would it cost"))
    with open_supervised(registry(), str(tmp_path), None, config, silent) as supervised:
        assert supervised.config == plain.config
        assert supervised.shape == plain.shape
        assert list(ends(supervised)) == expected
        assert supervised.preview(ask("what would it cost")) == preview
        with pytest.raises(PromptTooLongError, match=r"301 tokens.*256") as caught:
            supervised.preview(ask("x" * 300))
        assert caught.value.tokens == 301


def test_every_error_crosses_a_process_border() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KaminariError)}
    made = [PromptTooLongError("what happened", tokens=7), QueueFullError("what happened", 2.5)]
    made += [kind("what happened") for kind in kinds - {type(error) for error in made}]
    assert len(made) > 12
    for error in [*made, RequestError("what happened", param="messages[0]", code="word")]:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (str(again), again.code) == ("what happened", error.code)
        assert vars(again) == vars(error)


class _StubbornError(KaminariError):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_does_not_pickle_still_says_what_happened() -> None:
    error = picklable(_StubbornError("this", "that"))
    assert isinstance(error, EngineError)
    assert str(error) == "_StubbornError: this and that"
    kept = RequestError("no")
    assert picklable(kept) is kept
