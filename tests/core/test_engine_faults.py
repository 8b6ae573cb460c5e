"""What may go wrong inside one engine, and what must go on: deadlines, numbers that are not finite, steps that fail, health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from kaminari_core.cache import StaticCache
from kaminari_core.circuit import Circuit
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.errors import (
    DeadlineError,
    EngineClosedError,
    EngineError,
    EngineUnhealthyError,
    KaminariError,
    RequestError,
)
from kaminari_core.flow import Embedded, Event, Failed, Finished, Message, Prepared, Request, Result, TextPart
from kaminari_core.protocols import Cache, LayerCall, Model, Scheduler, Step, Waiting
from kaminari_core.scheduler import ContinuousScheduler, MicrobatchScheduler
from kaminari_core.testing import EchoModel, TinyModel

Schedule = Callable[[EngineConfig], Scheduler]


def _config(**changes: object) -> EngineConfig:
    return EngineConfig(compile=False, **{"slots": 4, "max_length": 256, "max_tokens": 64, **changes})  # type: ignore[arg-type]


def _engine(model: Model, config: EngineConfig, schedule: Schedule = ContinuousScheduler) -> Engine:
    cache = StaticCache(model.shape, config.slots, config.max_length, model.device, model.dtype)
    return Engine("test", model, cache, schedule(config), config)


def _ask(text: str, **options: object) -> Request:
    return Request((Message("user", (TextPart(text),)),), **options)  # type: ignore[arg-type]


class Collected:
    """Submits requests and holds how they ended, in the order of their ends."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.ends: dict[str, Result | KaminariError] = {}
        self._requests, self._done = requests, threading.Event()
        for request in requests:
            engine.submit(request, self._sink)

    def _sink(self, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            self.ends[event.request_id] = event.result if isinstance(event, Finished) else event.error
            if len(self.ends) == len(self._requests):
                self._done.set()

    def wait(self) -> list[Result | KaminariError]:
        assert self._done.wait(30), "not every request ended"
        return [self.ends[request.id] for request in self._requests]

    def texts(self) -> list[str]:
        return [end.text if isinstance(end, Result) else type(end).__name__ for end in self.wait()]


def _settled(engine: Engine) -> bool:
    stats = engine.stats()
    return (stats.preparing, stats.waiting, stats.running, stats.slots_busy) == (0, 0, 0, 0)


class Slow(EchoModel):
    """Takes a while wherever a test says so."""

    prepare_seconds = prefill_seconds = decode_seconds = 0.0

    def prepare(self, request: Request) -> Prepared:
        if request.messages[-1].parts != (TextPart("quick"),):
            time.sleep(self.prepare_seconds)
        return super().prepare(request)

    def prefill(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> torch.Tensor:
        time.sleep(self.prefill_seconds)
        return super().prefill(embedded, start, stop, cache, slot)

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
        time.sleep(self.decode_seconds)
        return super().decode(step, cache, layer_call)


@pytest.mark.parametrize("where", ["prepare", "prefill", "decode", "queue"])
def test_a_deadline_ends_a_request_wherever_it_is(where: str) -> None:
    config = _config(slots=1, prefill_chunk=4)
    model = Slow(config)
    with _engine(model, config) as engine:
        model.prepare_seconds = 0.4 if where == "prepare" else 0
        model.prefill_seconds = 0.1 if where == "prefill" else 0
        model.decode_seconds = 0.01
        others = [_ask("x" * 60)] if where == "queue" else []
        running = Collected(engine, others)
        late = _ask("y" * 60, timeout=0.15)
        with pytest.raises(DeadlineError, match=r"0\.15 s") as caught:
            engine.generate(late)
        assert caught.value.code == "timeout"
        model.prefill_seconds = 0
        assert engine.generate(_ask("quick", timeout=20)).text == "quick"
        if others:
            assert running.texts() == ["x" * 60], "the neighbour went on"
        assert engine.stats().finished == {"stop": 1 + len(others), "failed": 1}
        assert _settled(engine)


@pytest.mark.parametrize("where", ["prepare", "decode"])
def test_an_engine_is_closed_from_inside_a_sink(where: str) -> None:
    """Both threads that call sinks would wait for themselves: a worker whose preparing failed, and the engine thread."""
    config = _config()
    model = Slow(config)
    engine = _engine(model, config)
    engine.start()
    ended: list[Event] = []
    done = threading.Event()

    def sink(event: Event) -> None:
        engine.close(drain=60)
        if isinstance(event, Finished | Failed):
            ended.append(event)
            done.set()

    engine.submit(_ask("too long" * 100 if where == "prepare" else "hello"), sink)
    assert done.wait(30)
    while engine.health().state != "closed":
        time.sleep(0.01)
    with pytest.raises(EngineClosedError):
        engine.submit(_ask("more"), sink)
    assert len(ended) == 1
    assert isinstance(ended[0], Failed if where == "prepare" else Finished), "what had begun could finish"


def test_of_requests_that_are_ready_the_one_submitted_first_starts() -> None:
    config = _config(slots=1)
    model = Held(config)
    with _engine(model, config) as engine:
        running = Collected(engine, [_ask("x" * 60)])
        first = Collected(engine, [_ask("held", max_tokens=4)])
        second = Collected(engine, [_ask("other", max_tokens=4)])
        model.go.set()
        assert running.texts() == ["x" * 60]
        assert (first.texts(), second.texts()) == (["held"], ["othe"])


def test_an_id_is_free_again_while_its_late_first_owner_is_still_prepared() -> None:
    config = _config()
    model = Slow(config)
    model.prepare_seconds = 0.3
    with _engine(model, config) as engine:
        with pytest.raises(DeadlineError):
            engine.generate(_ask("slow", timeout=0.1, id="same"))
        assert engine.generate(_ask("quick", id="same")).text == "quick"
        time.sleep(0.3)
        assert _settled(engine)


class Held(EchoModel):
    """Prepares what says so only when it is told to."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.go = threading.Event()

    def prepare(self, request: Request) -> Prepared:
        if request.messages[-1].parts == (TextPart("held"),):
            assert self.go.wait(10)
        return super().prepare(request)


def test_a_request_that_is_prepared_just_as_its_deadline_passes_harms_nobody() -> None:
    """Two deadlines have passed when the engine looks; the second request is prepared while the first one is told so."""

    def dwell(event: Event) -> None:
        time.sleep(0.3)

    config = _config(prepare_threads=3)
    model = Held(config)
    ends: list[Event] = []

    def tell(event: Event) -> None:
        ends.append(event)
        model.go.set()
        time.sleep(0.1)

    with _engine(model, config) as engine:
        engine.submit(_ask(""), dwell)
        for _ in range(2):
            engine.submit(_ask("held", timeout=0.1), tell)
        while len(ends) < 2:
            time.sleep(0.001)
        assert [type(end) for end in ends] == [Failed, Failed]
        assert engine.generate(_ask("next")).text == "next"
        assert _settled(engine)


def test_whatever_a_scheduler_answers_can_be_waited_for() -> None:
    config = _config(batch_window=1e300)
    with _engine(EchoModel(config), config, MicrobatchScheduler) as engine:
        alone = Collected(engine, [_ask("a")])
        time.sleep(0.1)
        assert engine.alive
        company = Collected(engine, [_ask("b") for _ in range(3)])
        assert alone.texts() + company.texts() == ["a", "b", "b", "b"]
        engine.close(drain=1e300)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf"), 86_401, 1e308, 10**400])
def test_a_timeout_that_means_nothing_is_refused(timeout: float) -> None:
    config = _config()
    with _engine(EchoModel(config), config) as engine, pytest.raises(RequestError) as caught:
        engine.generate(_ask("a", timeout=timeout))
    assert caught.value.param == "timeout"


class Diverging(TinyModel):
    """Computes what is not a finite number, in the tower or in a step, for prompts that ask for it."""

    value = float("nan")

    def embed(self, prepared: Prepared) -> Embedded:
        embedded = super().embed(prepared)
        if prepared.tokens[1] == ord("!"):
            embedded.hidden[3:] = self.value
        return embedded

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
        logits = super().decode(step, cache, layer_call)
        for row, position in enumerate(step.positions[:, 0].tolist()):
            if position == 77:
                cache.values[:, row] = self.value
                logits[row, 0, 5] = self.value
        return logits


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bad", ["!" * 40, "?" * 70])
def test_numbers_that_are_not_finite_fail_their_row_and_nothing_after(value: float, bad: str) -> None:
    """The bad prompt spoils its cache row, in prefill or in its seventh step; the slot's next tenants are as they were alone."""
    config = _config(prefill_chunk=16)
    model = Diverging(config)
    model.value = value
    texts = [f"prompt {n} " * (1 + n) for n in range(5)]
    with _engine(model, config) as engine:

        def ask(text: str) -> Request:
            return _ask(text, max_tokens=12, ignore_end=True)

        alone = [engine.generate(ask(text)).text for text in texts]
        for _ in range(2):
            ends = Collected(engine, [ask(text) for text in [*texts[:2], bad, *texts[2:]]]).wait()
            if value == float("-inf") and bad[0] == "?":
                # One logit of minus infinity is how a model may forbid a token, so the row goes on; its cache is its own.
                continue
            failure = ends.pop(2)
            assert isinstance(failure, EngineError)
            assert "no finite numbers" in str(failure)
            assert [end.text if isinstance(end, Result) else end for end in ends] == alone
        assert [engine.generate(ask(text)).text for text in texts] == alone
        assert _settled(engine)
        assert engine.stats().circuit == "closed"


class Crashing(TinyModel):
    """Spoils the whole cache in a decode step and raises."""

    armed = False

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
        if self.armed:
            cache.keys.fill_(float("nan"))
            cache.values.fill_(float("nan"))
            raise RuntimeError("the device said no")
        return super().decode(step, cache, layer_call)


def test_a_step_that_spoils_the_cache_fails_its_rows_and_a_prompt_in_prefill_begins_again() -> None:
    config = _config(prefill_chunk=8, max_length=512)
    model = Crashing(config)
    with _engine(model, config) as engine:
        long = _ask("a long prompt " * 20, max_tokens=8, ignore_end=True)
        alone = engine.generate(long).text
        stream = engine.stream(_ask("short", max_tokens=300, ignore_end=True))
        next(stream)
        again = Request(long.messages, max_tokens=8, ignore_end=True)
        entering = Collected(engine, [again])
        while engine.stats().running < 2:
            time.sleep(0.001)
        model.armed = True
        last = list(stream)[-1]
        model.armed = False
        assert isinstance(last, Failed)
        assert "the device said no" in str(last.error)
        assert entering.texts() in ([alone], ["EngineError"]), "it was in prefill still, or already a row"
        assert engine.generate(Request(long.messages, max_tokens=8, ignore_end=True)).text == alone
        assert _settled(engine)


@pytest.fixture
def quick_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Circuit, "FIRST", 0.3)


@pytest.mark.usefixtures("quick_circuit")
def test_repeated_failure_opens_the_circuit_until_a_trial_succeeds() -> None:
    config = _config(slots=1)
    model = Crashing(config)
    with _engine(model, config) as engine:
        model.armed = True
        errors = Collected(engine, [_ask(f"prompt {n}") for n in range(10)]).wait()
        broken = [error for error in errors if type(error) is EngineError]
        refused = [error for error in errors if isinstance(error, EngineUnhealthyError)]
        assert (len(broken), len(refused)) == (3, 7), "three fail by themselves, and open it for those that wait"
        assert "the device said no" in str(refused[0])
        assert engine.stats().circuit == engine.health().circuit == "open"
        assert not engine.health().ready
        with pytest.raises(EngineUnhealthyError, match="3 times in a row"):
            engine.submit(_ask("no"), lambda event: None)
        time.sleep(0.35)
        assert engine.health().circuit == "half-open"
        with pytest.raises(EngineError, match="the device said no"):
            engine.generate(_ask("trial"))
        assert engine.health().circuit == "open", "at once: the trial failed"
        time.sleep(0.35)
        assert engine.health().circuit == "open", "for twice as long"
        time.sleep(0.3)
        model.armed = False
        engine.generate(_ask("trial"))
        assert engine.stats().circuit == "closed"
        assert len(Collected(engine, [_ask(f"prompt {n}") for n in range(10)]).wait()) == 10
        assert engine.stats().finished["failed"] == 11


@pytest.mark.usefixtures("quick_circuit")
def test_a_half_open_circuit_lets_one_through_at_a_time_and_a_probe_is_a_trial() -> None:
    config = _config(slots=1)
    model = Crashing(config)
    with _engine(model, config) as engine:
        model.armed = True
        for _ in range(3):
            with pytest.raises(EngineError):
                engine.probe()
        assert engine.health().circuit == "open"
        time.sleep(0.35)
        trial = engine.stream(_ask("hm", max_tokens=1))
        engine.submit(_ask("one"), lambda event: None)
        with pytest.raises(EngineUnhealthyError, match="being tried"):
            next(trial)
        while not _settled(engine):
            time.sleep(0.001)
        model.armed = False
        assert engine.probe() < 5
        assert engine.health().circuit == "closed"


def test_health_says_when_steps_stand_still() -> None:
    config = _config(stall_seconds=0.2)
    model = Slow(config)
    with _engine(model, config) as engine:
        assert engine.health().ready
        assert (engine.health().working, engine.health().last_step) == (False, None)
        assert engine.probe() < 5, "an idle engine runs a step when asked"
        last = engine.health().last_step
        assert last is not None
        assert last < 5
        model.decode_seconds = 1.0
        stream = engine.stream(_ask("ab"))
        next(stream)
        with pytest.raises(EngineError, match=r"no decode step ended within 0\.3 s"):
            engine.probe(0.3)
        assert engine.health().stalled
        assert not engine.health().ready
        stream.close()
        deadline = time.monotonic() + 10
        while engine.health().stalled and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.health().ready
    assert engine.health().state == "closed"


class Doomed(ContinuousScheduler):
    """Takes the engine thread down."""

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str]:
        time.sleep(0.3)
        raise RuntimeError("as asked")


def test_a_probe_ends_with_the_engine_it_asked() -> None:
    config = _config()
    engine = _engine(EchoModel(config), config, Doomed)
    engine.start()
    asked = Collected(engine, [_ask("abc")])
    while engine.stats().waiting == 0:
        time.sleep(0.001)
    with pytest.raises(EngineError, match="as asked"):
        engine.probe()
    assert asked.texts() == ["EngineError"]
    assert engine.health().state == "failed"
    engine.close()
    engine.close()


def test_a_microbatch_is_one_batch_and_says_so() -> None:
    config = _config(batch_window=0.3, slots=3)
    with _engine(EchoModel(config), config, MicrobatchScheduler) as engine:
        spent, began = time.process_time(), time.monotonic()
        first = Collected(engine, [_ask("a" * 20)])
        time.sleep(0.1)
        second = Collected(engine, [_ask("b" * 10)])
        results = [end for end in [*first.wait(), *second.wait()] if isinstance(end, Result)]
        assert [result.text for result in results] == ["a" * 20, "b" * 10]
        assert 0.29 < time.monotonic() - began < 2
        assert time.process_time() - spent < 0.2, "the wait is a wait"
        assert {result.batch_id for result in results} == {1}
        assert [result.batch_size for result in results] == [2, 2]
        assert 0.25 < results[0].timings.window <= results[0].timings.queue < 1
        assert 0.15 < results[1].timings.window <= results[1].timings.queue < 0.29
        ends = [
            end for end in Collected(engine, [_ask("c" * n) for n in range(1, 6)]).wait() if isinstance(end, Result)
        ]
        assert sorted(end.batch_id or 0 for end in ends) == [2, 2, 2, 3, 3]
        assert engine.stats().batches == 3


def test_a_group_is_prefilled_before_any_of_it_is_decoded() -> None:
    config = _config(batch_window=0.2, slots=3)
    log: list[str] = []

    class Logging(EchoModel):
        def prefill(self, *arguments: object) -> torch.Tensor:
            log.append("prefill")
            return super().prefill(*arguments)  # type: ignore[arg-type]

        def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
            log.append("decode")
            return super().decode(step, cache, layer_call)

    with _engine(Logging(config), config, MicrobatchScheduler) as engine:
        Collected(engine, [_ask("abc") for _ in range(3)]).wait()
    assert log == ["prefill"] * 3 + ["decode"] * 3


def test_an_interactive_request_passes_the_batch_that_waits() -> None:
    config = _config(slots=1, prepare_threads=1)
    model = Slow(config)
    model.decode_seconds = 0.002
    with _engine(model, config) as engine:
        pages = [_ask(f"page {n} " * 3, priority="batch") for n in range(6)]
        folder = Collected(engine, pages)
        while not engine.stats().running:
            time.sleep(0.001)
        chat = engine.generate(_ask("chat"))
        assert len(folder.ends) <= 2
        assert chat.text == "chat"
        folder.wait()
        assert list(folder.ends) == [page.id for page in pages]


def test_an_unknown_priority_is_refused() -> None:
    config = _config()
    with _engine(EchoModel(config), config) as engine, pytest.raises(RequestError) as caught:
        engine.generate(_ask("a", priority="urgent"))
    assert caught.value.param == "priority"


class Wrong:
    """A scheduler that starts what it is told to, whatever waits."""

    def __init__(self, *ids: str) -> None:
        self._ids = ids

    def admit(self, waiting: Sequence[Waiting], free: int, running: int, now: float) -> Sequence[str]:
        """The same ids every time."""
        return self._ids


@pytest.mark.parametrize("ids", [("nobody",), ("first", "first"), ("first", "nobody")])
def test_a_scheduler_that_starts_what_does_not_wait_is_named(ids: tuple[str, ...]) -> None:
    config = _config(scheduler="wrong")
    with _engine(EchoModel(config), config, lambda _: Wrong(*ids)) as engine:
        [end] = Collected(engine, [_ask("a", id="first")]).wait()
        assert isinstance(end, EngineError)
        assert "the scheduler 'wrong' started" in str(end)
        assert not engine.alive
