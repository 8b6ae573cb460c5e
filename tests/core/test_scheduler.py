"""The admission policies: what holds for any arrivals, and what each promises on top."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaminari_core.config import EngineConfig
from kaminari_core.protocols import Group, Later, Scheduler, Waiting
from kaminari_core.scheduler import (
    CHAT_GAP,
    PATIENCE,
    ContinuousScheduler,
    MicrobatchScheduler,
    StreamingScheduler,
)

Make = Callable[[EngineConfig], Scheduler]
ALL: tuple[Make, ...] = (ContinuousScheduler, MicrobatchScheduler, StreamingScheduler)
STEP = 0.02


@dataclass
class Arrival:
    """A request of the simulation: when it comes, how many steps it decodes."""

    at: float
    steps: int
    priority: str


@dataclass
class Simulation:
    """What the loop does with a scheduler's answers, in a time of its own."""

    scheduler: Scheduler
    slots: int
    waiting: list[Waiting] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    started: list[Waiting] = field(default_factory=list)
    starts: list[tuple[float, tuple[str, ...], int]] = field(default_factory=list)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        coming = sorted(enumerate(arrivals), key=lambda item: item[1].at)
        steps = {str(index): arrival.steps for index, arrival in coming}
        now = 0.0
        for _ in range(100_000):
            while coming and coming[0][1].at <= now:
                index, arrival = coming.pop(0)
                self.waiting.append(Waiting(str(index), arrival.at, 10, arrival.priority))  # type: ignore[arg-type]
            later = self._admit(now, steps)
            if not (coming or self.waiting or self.running):
                return
            if self.running:
                self.running = {name: left - 1 for name, left in self.running.items() if left > 1}
                now += STEP
            else:
                changes = ([coming[0][1].at] if coming else []) + [later]
                assert min(changes) > now, "nothing runs, nothing comes, and the scheduler starts nothing"
                assert min(changes) < math.inf, "nothing will ever change"
                now = min(changes)
        raise AssertionError("the simulation does not end")

    def _admit(self, now: float, steps: dict[str, int]) -> float:
        free = self.slots - len(self.running)
        if not self.waiting or not free:
            return math.inf
        answer = self.scheduler.admit(tuple(self.waiting), free, len(self.running), now)
        if isinstance(answer, Later):
            assert answer.at > now
            return answer.at
        ids = answer.ids if isinstance(answer, Group) else answer
        assert len(ids) <= free
        if ids:
            self.starts.append((now, tuple(ids), len(self.running)))
        for name in ids:
            (request,) = [request for request in self.waiting if request.id == name]
            self.waiting.remove(request)
            self.started.append(request)
            self.running[name] = steps[name]
        return math.inf


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.floats(0, 20, allow_nan=False),
        steps=st.integers(1, 100),
        priority=st.sampled_from(["interactive", "batch"]),
    ),
    max_size=30,
)


@pytest.mark.parametrize("make", ALL)
@given(arrivals=arrivals, slots=st.integers(1, 5))
def test_each_request_starts_once_and_in_order_within_its_priority(
    make: Make, arrivals: list[Arrival], slots: int
) -> None:
    simulation = Simulation(make(EngineConfig(slots=slots)), slots)
    simulation.run(arrivals)
    started = [int(request.id) for request in simulation.started]
    assert sorted(started) == list(range(len(arrivals))), "nothing twice, nothing forgotten"
    for priority in ("interactive", "batch"):
        times = [arrivals[index].at for index in started if arrivals[index].priority == priority]
        assert times == sorted(times)


@pytest.mark.parametrize("make", ALL)
@settings(max_examples=20, deadline=None)
@given(slots=st.integers(1, 4), steps=st.integers(20, 60), patient=st.integers(1, 3))
def test_a_stream_of_chats_does_not_starve_the_folder(make: Make, slots: int, steps: int, patient: int) -> None:
    """Chats arrive faster than they can be served, for half a minute: each batch request in turn is overdue after PATIENCE."""
    apart = STEP * steps / slots / 1.2
    chats = [Arrival(n * apart, steps, "interactive") for n in range(int(30 / apart))]
    pages = [Arrival(0.5, steps, "batch") for _ in range(patient)]
    simulation = Simulation(make(EngineConfig(slots=slots)), slots)
    simulation.run([*chats, *pages])
    times = {name: at for at, names, _ in simulation.starts for name in names}
    # A slot is free at the latest when one of the running requests ends; a microbatch, when all of it does.
    longest = STEP * steps + 2 * STEP
    for turn in range(patient):
        assert times[str(len(chats) + turn)] <= 0.5 + (turn + 1) * (PATIENCE + longest) + 0.05


@pytest.mark.parametrize("make", ALL)
@given(slots=st.integers(1, 4), pages=st.integers(5, 60), at=st.floats(0.1, 3))
def test_a_chat_passes_the_whole_folder_that_waits(make: Make, slots: int, pages: int, at: float) -> None:
    """Where nothing is overdue, an interactive request starts with the first slot that becomes free."""
    folder = [Arrival(0.0, 20, "batch") for _ in range(pages)]
    simulation = Simulation(make(EngineConfig(slots=slots)), slots)
    simulation.run([*folder, Arrival(at, 5, "interactive")])
    times = {name: when for when, names, _ in simulation.starts for name in names}
    assert times[str(pages)] - at <= 20 * STEP + 2 * STEP + 0.05


def test_a_folder_alone_gets_every_slot_and_leaves_one_while_somebody_chats() -> None:
    scheduler = ContinuousScheduler(EngineConfig(slots=4))
    pages = [Waiting(f"page {n}", 0.0, 10, "batch") for n in range(9)]
    assert len(scheduler.admit(pages, 4, 0, 1.0)) == 4
    assert scheduler.admit([*pages[4:], Waiting("chat", 2.0, 10)], 1, 3, 2.0) == ["chat"]
    assert scheduler.admit(pages[4:], 1, 3, 2.1) == [], "the next message is expected"
    assert scheduler.admit(pages[4:], 2, 2, 2.2) == ["page 4"]
    assert scheduler.admit(pages[5:], 1, 3, 2.2 + PATIENCE) == ["page 5"], "overdue"
    assert scheduler.admit(pages[6:], 1, 3, 2.0 + CHAT_GAP) == ["page 6"], "the conversation has ended"


def test_a_microbatch_waits_for_company_and_then_for_its_end() -> None:
    scheduler = MicrobatchScheduler(EngineConfig(slots=3, batch_window=0.5))
    first, second, third, fourth = (Waiting(str(n), 10 + n / 10, 10) for n in range(4))
    assert scheduler.admit([first], 3, 0, 10.0) == Later(10.5)
    assert scheduler.admit([first, second], 3, 0, 10.1) == Later(10.5)
    assert scheduler.admit([first, second, third], 3, 0, 10.2) == Group(["0", "1", "2"]), "full before the window ends"
    assert scheduler.admit([fourth], 2, 1, 10.9) == (), "no admission until the group ends"
    assert scheduler.admit([fourth], 3, 0, 10.9) == Group(["3"]), "its window ended while it waited"


@given(arrivals=arrivals, slots=st.integers(1, 5))
def test_microbatches_never_overlap_and_nobody_waits_longer_than_the_window_on_purpose(
    arrivals: list[Arrival], slots: int
) -> None:
    simulation = Simulation(MicrobatchScheduler(EngineConfig(slots=slots)), slots)
    simulation.run(arrivals)
    busy_until = 0.0
    for at, names, running in simulation.starts:
        assert running == 0
        oldest = min(arrivals[int(name)].at for name in names)
        assert at <= max(oldest + 0.05, busy_until) + STEP + 1e-9
        busy_until = at + STEP * max(arrivals[int(name)].steps for name in names)


@given(arrivals=arrivals)
def test_streaming_is_one_at_a_time(arrivals: list[Arrival]) -> None:
    simulation = Simulation(StreamingScheduler(EngineConfig(slots=4)), 4)
    simulation.run(arrivals)
    assert all(len(names) == 1 and running == 0 for _, names, running in simulation.starts)
