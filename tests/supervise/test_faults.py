"""Whatever ends the engine's process, each request ends with its reply or with an error that says so, and the next one works."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest

from kaminari_core.errors import DeadlineError, EngineError, EngineRestartedError, PoisonError
from kaminari_core.flow import Result
from kaminari_core.supervise.engine import SupervisedEngine
from kaminari_core.supervise.keeper import RestartPolicy
from tests.supervise.conftest import Asked, Start, ask, wait_until

LONG = "a long reply " * 40
# How the error says that it ended. The last of them end by the same ways as the first.
HOW = [
    ("lock", "exit code 1"),
    ("exit", "exit code 3"),
    ("stop", "made no step for 1 s"),
    pytest.param("hang", "exit code 1", marks=pytest.mark.slow),
    pytest.param("kill", "signal 9 (SIGKILL)", marks=pytest.mark.slow),
    pytest.param("break", "exit code 70", marks=pytest.mark.slow),
]


def right(asked: Asked, text: str) -> bool:
    """Whether a neighbour of a fault got its reply, or lost one that had begun and was told so."""
    return asked.text() == text or (isinstance(asked.end, EngineRestartedError) and asked.streamed != "")


def test_it_serves_as_an_engine_does(engine: SupervisedEngine) -> None:
    texts = [f"prompt number {n} " * (1 + n % 5) for n in range(20)]
    asked = [Asked(engine, ask(text)) for text in texts]
    assert [one.text() for one in asked] == texts
    assert engine.generate(ask("hello")).text == "hello"
    assert "".join(getattr(event, "text", "") for event in engine.stream(ask("hello"))) == "hello"
    assert (engine.name, engine.config.device, engine.shape.vocabulary) == ("faulty", "cpu", 259)
    stats = engine.stats()
    assert stats.finished["stop"] >= 22
    assert stats.rows / stats.steps > 1.5
    assert engine.health().ready


@pytest.mark.parametrize(("fault", "how"), HOW)
def test_a_fault_in_a_step_ends_what_had_begun_and_nothing_else(engine: SupervisedEngine, fault: str, how: str) -> None:
    restarts, counted = engine.stats().restarts, engine.stats().generated_tokens
    begun = [Asked(engine, ask(LONG)).begun() for _ in range(3)]
    culprit = Asked(engine, ask(f"decode {fault}"))
    waiting = [Asked(engine, ask(f"waiting {n}")) for n in range(4)]
    if fault == "stop":
        wait_until(lambda: engine.health().stalled)
        assert not engine.health().ready
        with pytest.raises(EngineError):
            engine.probe(0.2)
    for one in begun:
        end = one.wait()
        assert isinstance(end, EngineRestartedError)
        assert end.code == "engine_restarted"
        assert how in str(end)
        assert LONG.startswith(one.streamed)
    assert [one.text() for one in waiting] == [f"waiting {n}" for n in range(4)]
    assert isinstance(culprit.wait(), EngineRestartedError)
    assert engine.stats().restarts == restarts + 1
    assert engine.stats().generated_tokens > counted, "counters go on"


def test_a_step_that_raises_needs_no_restart(engine: SupervisedEngine) -> None:
    restarts = engine.stats().restarts
    begun = Asked(engine, ask(LONG)).begun()
    culprit = Asked(engine, ask("decode raise"))
    waiting = Asked(engine, ask("waiting"))
    assert (begun.text(), culprit.text()) == ("EngineError", "EngineError")
    assert waiting.text() in ("waiting", "EngineError"), "it had its slot already, or not yet"
    assert engine.stats().restarts == restarts


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("prefill", "exit"),
        pytest.param("prefill", "lock", marks=pytest.mark.slow),
        pytest.param("prepare", "exit", marks=pytest.mark.slow),
        pytest.param("prepare", "hang", marks=pytest.mark.slow),
    ],
)
def test_a_request_without_a_token_is_run_again(
    engine: SupervisedEngine, stage: str, fault: str, tmp_path: Path
) -> None:
    text = f"once {tmp_path / 'done'} {stage} {fault}"
    before, culprit, behind = (Asked(engine, ask(said)) for said in ("before", text, "behind"))
    assert culprit.text() == text
    assert right(before, "before")
    assert right(behind, "behind")


@pytest.mark.parametrize("stage", ["prefill", pytest.param("prepare", marks=pytest.mark.slow)])
def test_a_request_that_kills_the_process_twice_alone_is_refused(engine: SupervisedEngine, stage: str) -> None:
    restarts = engine.stats().restarts
    good = [Asked(engine, ask(f"good {n}")) for n in range(3)]
    poison = Asked(engine, ask(f"{stage} exit"))
    behind = [Asked(engine, ask(f"behind {n}")) for n in range(6)]
    assert all(right(one, f"good {n}") for n, one in enumerate(good))
    assert all(right(one, f"behind {n}") for n, one in enumerate(behind))
    error = poison.wait()
    assert isinstance(error, PoisonError)
    assert poison.id in str(error)
    assert "exit code 3" in str(error)
    assert engine.stats().restarts - restarts in (2, 3), "once in company, unless it was alone then, and twice alone"


def test_killed_while_idle(engine: SupervisedEngine) -> None:
    restarts = engine.health().restarts
    os.kill(engine.process_id or 0, signal.SIGKILL)
    wait_until(lambda: engine.health().restarts > restarts and engine.health().ready)


def test_deadlines_and_cancelling_hold_while_there_is_no_process(engine: SupervisedEngine) -> None:
    os.kill(engine.process_id or 0, signal.SIGKILL)
    wait_until(lambda: engine.health().state == "restarting")
    assert not engine.health().ready
    assert "SIGKILL" in (engine.health().reason or "")
    with pytest.raises(EngineError, match="restarted"):
        engine.probe()
    began = time.monotonic()
    late, leaving, staying = Asked(engine, ask("a", timeout=0.2)), Asked(engine, ask("b")), Asked(engine, ask("c"))
    assert engine.alive
    assert engine.stats().waiting == 3
    engine.cancel(leaving.id)
    end = leaving.wait()
    assert isinstance(end, Result)
    assert end.finish_reason == "cancelled"
    assert isinstance(late.wait(), DeadlineError)
    assert time.monotonic() - began < 1
    assert staying.text() == "c"


def test_deadlines_and_cancelling_hold_while_it_decodes(engine: SupervisedEngine) -> None:
    late, leaving = Asked(engine, ask(LONG, timeout=0.3)).begun(), Asked(engine, ask(LONG)).begun()
    engine.cancel(leaving.id)
    end = leaving.wait()
    assert isinstance(end, Result)
    assert end.finish_reason == "cancelled"
    assert isinstance(late.wait(), DeadlineError)
    wait_until(lambda: engine.stats().running == 0)


def test_a_sink_that_raises_only_cancels_its_own_request(
    engine: SupervisedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    before = engine.stats().generated_tokens

    def sink(event: object) -> None:
        raise RuntimeError("sink")

    engine.submit(ask("x" * 500), sink)
    assert Asked(engine, ask("fine")).text() == "fine"
    wait_until(lambda: engine.stats().running == 0)
    assert "sink" in caplog.text
    assert engine.stats().generated_tokens - before < 500


def test_logs_of_the_child_are_logged_here(engine: SupervisedEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert Asked(engine, ask("prefill raise")).text() == "EngineError"
    (record,) = [record for record in caplog.records if "the prefill failed" in record.getMessage()]
    assert record.name == "kaminari_core.loop"
    assert record.process != os.getpid()
    assert "as asked" in caplog.text


def test_the_stack_of_a_hang_is_in_the_log(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    engine = start(policy=RestartPolicy(most_failures=0))
    hanging = Asked(engine, ask("decode lock"))
    assert isinstance(hanging.wait(), EngineRestartedError)
    engine.close()
    log = capfd.readouterr().err
    assert "in hang_with_the_lock" in log
    assert "in decode" in log
