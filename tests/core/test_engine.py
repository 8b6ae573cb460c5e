"""The engine on small real models: slots, compaction, limits, cancelling, isolation of failures."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from PIL import Image

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.errors import EngineClosedError, EngineError, QueueFullError, RequestError
from kaminari_core.flow import (
    Delta,
    Embedded,
    Event,
    Failed,
    Finished,
    ImagePart,
    Message,
    Part,
    Request,
    Result,
    Sampling,
    TextPart,
)  # fmt: skip
from kaminari_core.protocols import Cache, LayerCall, Model, Step
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.testing import END_TOKEN, EchoModel, TinyModel


def _engine(model: Model, config: EngineConfig) -> Engine:
    cache = StaticCache(model.shape, config.slots, config.max_length, model.device, model.dtype)
    return Engine("test", model, cache, ContinuousScheduler(config), config)


def _config(**changes: int) -> EngineConfig:
    settings = {"slots": 4, "max_length": 256, "max_tokens": 64} | changes
    return EngineConfig(compile=False, **settings)


def _ask(*parts: Part | str, sampling: Sampling | None = None, **options: object) -> Request:
    said = tuple(TextPart(part) if isinstance(part, str) else part for part in parts)
    return Request((Message("user", said),), sampling=sampling or Sampling(), **options)  # type: ignore[arg-type]


def _picture(size: tuple[int, int], seed: int) -> ImagePart:
    pixels = random.Random(seed).randbytes(3 * size[0] * size[1])
    out = io.BytesIO()
    Image.frombytes("RGB", size, pixels).save(out, "PNG")
    return ImagePart(out.getvalue())


def _all(engine: Engine, requests: Sequence[Request], delays: Sequence[float] = ()) -> list[Result | Failed]:
    """Submit requests, some a little later, and wait for all of them."""
    ends: dict[str, Result | Failed] = {}
    done = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ends[event.request_id] = event.result if isinstance(event, Finished) else event
            if len(ends) == len(requests):
                done.set()

    for index, request in enumerate(requests):
        time.sleep(delays[index] if delays else 0)
        engine.submit(request, sink)
    assert done.wait(60), "not every request ended"
    return [ends[request.id] for request in requests]


@pytest.fixture
def echo() -> Iterator[Engine]:
    config = _config()
    with _engine(EchoModel(config), config) as engine:
        yield engine


def test_a_reply_streams_and_ends(echo: Engine) -> None:
    events = list(echo.stream(_ask("hello")))
    *deltas, last = events
    assert isinstance(last, Finished)
    assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == last.result.text == "hello"
    assert (last.result.finish_reason, last.result.finish_detail) == ("stop", "end_token")
    assert last.result.usage.completion_tokens == 6, "five letters and the end token"
    assert last.result.usage.prompt_tokens == 6


def test_rows_of_many_lengths_keep_their_own_cache_through_retiring_and_moving(echo: Engine) -> None:
    """Forty scripts over four slots: each row says its own script, which is in its cache row and nowhere else."""
    texts = ["".join(random.Random(n).choices("abcdefgh", k=1 + (n * 37) % 60)) for n in range(40)]
    results = _all(echo, [_ask(text, max_tokens=100) for text in texts])
    assert [result.text for result in results if isinstance(result, Result)] == texts
    stats = echo.stats()
    assert (stats.running, stats.waiting, stats.preparing, stats.slots_busy) == (0, 0, 0, 0)
    assert stats.finished == {"stop": 40}
    assert stats.rows / stats.steps > 2, "rows were decoded together"


def test_batch_equals_solo_for_pictures_and_texts_admitted_at_different_steps() -> None:
    config = _config(slots=4, prefill_chunk=16)
    asks = [
        lambda n=n: _ask(
            *([_picture((40 + 30 * n, 50), n)] if n % 3 else []), f"what is {n}? " * (1 + n), max_tokens=5 + 7 * n
        )
        for n in range(8)
    ]
    with _engine(TinyModel(config), config) as engine:
        solo = [engine.generate(ask()) for ask in asks]
        together = _all(engine, [ask() for ask in asks], [0.0, 0.0, 0.01, 0.0, 0.02, 0.0, 0.005, 0.0])
        for alone, shared in zip(solo, together, strict=True):
            assert isinstance(shared, Result)
            assert [token.id for token in shared.tokens] == [token.id for token in alone.tokens]
            assert shared.text == alone.text
        assert max(result.batch_size for result in together if isinstance(result, Result)) == 4
        assert all(result.batch_size == 1 for result in solo)
        assert len({result.text for result in solo}) == 8, "the model does tell these prompts apart"


def test_a_long_prompt_is_prefilled_in_chunks_between_steps_of_a_running_row() -> None:
    config = _config(max_length=2048, prefill_chunk=32, slots=2)
    with _engine(TinyModel(config), config) as engine:
        long = "x" * 1000
        alone = engine.generate(_ask(long, max_tokens=5, ignore_end=True))
        running = engine.stream(_ask("go on", max_tokens=200, ignore_end=True))
        next(running)
        shared = engine.generate(_ask(long, max_tokens=5, ignore_end=True))
        during = engine.stats().steps
        assert shared.text == alone.text
        assert during > 1000 // 32, "the running row took a step between any two chunks"
        running.close()


@pytest.mark.parametrize(
    ("length", "tokens", "detail"), [(256, 1, "context_full"), (250, 7, "context_full"), (200, 9, "max_tokens")]
)
def test_the_last_cache_position_is_used_and_none_beyond(length: int, tokens: int, detail: str) -> None:
    config = _config()
    model = EchoModel(config, lambda request: [97] * length)
    with _engine(model, config) as engine:
        result = engine.generate(_ask("", max_tokens=9, ignore_end=True))
    assert len(result.tokens) == tokens
    assert (result.finish_reason, result.finish_detail) == ("length", detail)


def test_a_prompt_beyond_the_cache_is_refused_with_its_numbers(echo: Engine) -> None:
    with pytest.raises(RequestError, match=r"257 tokens.*256") as caught:
        echo.generate(_ask("x" * 256))
    assert caught.value.code == "context_length_exceeded"


def test_max_tokens_ends_with_length_even_at_one_token(echo: Engine) -> None:
    result = echo.generate(_ask("abcdef", max_tokens=1))
    assert (result.text, result.finish_reason, result.usage.completion_tokens) == ("a", "length", 1)


def test_a_stop_string_over_several_tokens_never_leaks(echo: Engine) -> None:
    request = _ask("abcDEFGHIJklm", stop=("DEFGHIJ",))
    events = list(echo.stream(request))
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "abc"
    assert isinstance(events[-1], Finished)
    assert events[-1].result.finish_detail == "stop_string"


def test_half_a_stop_string_at_the_end_is_released(echo: Engine) -> None:
    assert echo.generate(_ask("abcDEF", stop=("DEFGHIJ",))).text == "abcDEF"
    assert echo.generate(_ask("abcDEFx", max_tokens=6, stop=("DEFGHIJ",))).text == "abcDEF"


def test_characters_of_many_tokens_arrive_whole(echo: Engine) -> None:
    text = "\U0001f469‍\U0001f469‍\U0001f467 ď 漢"
    deltas = [event.text for event in echo.stream(_ask(text)) if isinstance(event, Delta)]
    assert "".join(deltas) == text
    assert not any("�" in delta for delta in deltas)


@pytest.mark.parametrize(
    "script", [[0x61, 0xFF, 0x62, END_TOKEN], [0x61, 0xE6, END_TOKEN], [0xC3, 0x20, 0x62, END_TOKEN]]
)
def test_an_invalid_byte_becomes_one_replacement_in_stream_and_whole(script: list[int]) -> None:
    config = _config()
    with _engine(EchoModel(config, lambda request: script), config) as engine:
        events = list(engine.stream(_ask("")))
    assert isinstance(events[-1], Finished)
    streamed = "".join(event.text for event in events if isinstance(event, Delta))
    assert streamed == events[-1].result.text == bytes(script[:-1]).decode("utf-8", "replace")


def test_seeded_rows_do_not_depend_on_their_neighbours() -> None:
    config = _config()
    seeded = lambda: _ask("tell me", sampling=Sampling(temperature=1.0, seed=7), max_tokens=20, ignore_end=True)  # noqa: E731
    free = lambda: _ask("tell me", sampling=Sampling(temperature=1.0), max_tokens=20, ignore_end=True)  # noqa: E731
    with _engine(TinyModel(config), config) as engine:
        alone = engine.generate(seeded()).text
        mixed = _all(engine, [free(), seeded(), free(), seeded()])
        texts = [result.text for result in mixed if isinstance(result, Result)]
        assert texts[1] == texts[3] == alone
        assert len({texts[0], texts[2], engine.generate(free()).text}) == 3


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    config = _config()
    with _engine(TinyModel(config), config) as engine:
        plain = engine.generate(_ask("hm", max_tokens=6))
        result = engine.generate(_ask("hm", max_tokens=6, sampling=Sampling(logprobs=3)))
        hot = engine.generate(_ask("hm", max_tokens=1, sampling=Sampling(logprobs=20, temperature=2.0, seed=1)))
    assert [token.id for token in result.tokens] == [token.id for token in plain.tokens]
    for token in result.tokens:
        assert len(token.top) == 3
        assert token.logprob == pytest.approx(token.top[0].logprob), "greedy takes the most likely token"
        assert token.top[0].token == token.id
    assert [other.logprob for other in hot.tokens[0].top[:3]] == pytest.approx(
        [o.logprob for o in result.tokens[0].top], abs=1e-4
    )


class Breaking(EchoModel):
    """An EchoModel that fails where its switches say; the switch word is in the prompt."""

    def __init__(self, config: EngineConfig, failure: Callable[[], Exception]) -> None:
        super().__init__(config)
        self.failure, self.break_decode = failure, False

    def prefill(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> torch.Tensor:
        """Fails for a prompt that begins with an exclamation mark."""
        if embedded.hidden[0, 0] == ord("!"):
            raise self.failure()
        return super().prefill(embedded, start, stop, cache, slot)

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> torch.Tensor:
        """Fails once after `break_decode` was set."""
        if self.break_decode:
            self.break_decode = False
            raise self.failure()
        return super().decode(step, cache, layer_call)


def test_a_failing_prefill_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    config = _config()
    with _engine(Breaking(config, lambda: ValueError("boom")), config) as engine:
        ends = _all(engine, [_ask("!" if n == 3 else f"good {n} " * 5) for n in range(8)])
        assert isinstance(ends[3], Failed)
        assert isinstance(ends[3].error, EngineError)
        assert "boom" in str(ends[3].error)
        assert [end.text for end in ends if isinstance(end, Result)] == [f"good {n} " * 5 for n in range(8) if n != 3]
        assert engine.stats().slots_busy == 0
    assert "prefill failed" in caplog.text


def test_a_failing_decode_fails_its_rows_and_the_next_request_works() -> None:
    config = _config()
    model = Breaking(config, lambda: RuntimeError("bad step"))
    with _engine(model, config) as engine:
        running = engine.stream(_ask("a" * 100, max_tokens=90))
        next(running)
        model.break_decode = True
        last = list(running)[-1]
        assert isinstance(last, Failed)
        assert "bad step" in str(last.error)
        assert engine.generate(_ask("fine")).text == "fine"
        assert engine.stats().slots_busy == 0


def test_running_out_of_memory_says_what_to_lower() -> None:
    config = _config()
    with (
        _engine(Breaking(config, lambda: torch.OutOfMemoryError("no")), config) as engine,
        pytest.raises(EngineError, match="--slots"),
    ):
        engine.generate(_ask("!"))


def test_cancelling_frees_the_row_and_keeps_the_text(echo: Engine) -> None:
    request = _ask("a" * 200, max_tokens=190)
    stream = echo.stream(request)
    next(stream)
    echo.cancel(request.id)
    last = list(stream)[-1]
    assert isinstance(last, Finished)
    assert last.result.finish_reason == "cancelled"
    assert set(last.result.text) == {"a"}
    assert echo.stats().slots_busy == 0


def test_leaving_a_stream_early_cancels_it(echo: Engine) -> None:
    stream = echo.stream(_ask("a" * 200, max_tokens=190))
    next(stream)
    stream.close()
    deadline = time.monotonic() + 10
    while echo.stats().running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert echo.stats().finished == {"cancelled": 1}


def test_a_waiting_request_can_be_cancelled() -> None:
    config = _config(slots=1)
    with _engine(EchoModel(config), config) as engine:
        running = engine.stream(_ask("a" * 200, max_tokens=190))
        next(running)
        request = _ask("b")
        waiting = engine.stream(request)
        ends: list[Event] = []
        thread = threading.Thread(target=lambda: ends.extend(waiting))
        thread.start()
        while request.id not in engine._open:
            time.sleep(0.001)
        engine.cancel(request.id)
        thread.join(10)
        assert isinstance(ends[-1], Finished)
        assert ends[-1].result.finish_reason == "cancelled"
        running.close()


def test_a_full_queue_refuses_and_the_accepted_finish() -> None:
    config = _config(slots=1, queue=4)
    opened = threading.Event()

    def held_back(request: Request) -> list[int]:
        assert opened.wait(30)
        return [*b"fine", END_TOKEN]

    ends: list[Event] = []
    refusals: list[str] = []

    def sink(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ends.append(event)

    with _engine(EchoModel(config, held_back), config) as engine:
        for _ in range(20):
            try:
                engine.submit(_ask(""), sink)
            except QueueFullError as error:
                refusals.append(str(error))
        opened.set()
        engine.close(drain=30)
    assert len(refusals) == 16
    assert all("4 requests are waiting" in refusal for refusal in refusals)
    assert [event.result.text for event in ends if isinstance(event, Finished)] == ["fine"] * 4


def test_a_closed_engine_says_so_and_fails_what_was_open() -> None:
    config = _config()
    engine = _engine(EchoModel(config), config)
    engine.start()
    stream = engine.stream(_ask("a" * 200, max_tokens=190))
    next(stream)
    engine.close()
    last = list(stream)[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        engine.submit(_ask("a"), lambda event: None)


def test_a_sink_that_raises_only_cancels_its_own_request(echo: Engine) -> None:
    def sink(event: Event) -> None:
        raise RuntimeError("sink")

    echo.submit(_ask("a" * 200, max_tokens=190), sink)
    assert echo.generate(_ask("fine")).text == "fine"
    deadline = time.monotonic() + 10
    while sum(echo.stats().finished.values()) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert echo.stats().finished == {"stop": 1, "cancelled": 1}


@pytest.mark.parametrize(
    ("sampling", "max_tokens", "param"),
    [
        (Sampling(temperature=-1.0), 5, "temperature"),
        (Sampling(logit_bias={99999: 1.0}), 5, "logit_bias"),
        (Sampling(), 0, "max_tokens"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    echo: Engine, sampling: Sampling, max_tokens: int, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        echo.submit(_ask("a", sampling=sampling, max_tokens=max_tokens), lambda event: None)
    assert caught.value.param == param
    assert echo.stats().preparing == 0


def test_timings_add_up(echo: Engine) -> None:
    timings = echo.generate(_ask("a" * 50)).timings
    assert 0 < timings.ttft <= timings.total
    assert timings.decode <= timings.total
    assert timings.prepare + timings.queue + timings.prefill <= timings.ttft + 1e-3
    assert timings.tokens_per_s == pytest.approx(50 / timings.decode)
    assert timings.memory > 0
