"""The parent's book, against a child that does anything: each request ends once, and none is forgotten."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kaminari_core.errors import EngineRestartedError, PoisonError
from kaminari_core.flow import Delta, Event, Failed, Finished, Request, Token
from kaminari_core.supervise.ledger import DEATHS_ALONE, Entry, Ledger, cancelled
from tests.supervise.conftest import ask

HOW = "was killed by signal 9 (SIGKILL)"


class Book(RuleBasedStateMachine):
    """A ledger, and a child that is moved at random."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ends: Counter[str] = Counter()
        self.submitted: list[Request] = []
        self.errors: dict[str, Exception] = {}

    @rule()
    def submit(self) -> None:
        request = ask("x")
        self.submitted.append(request)
        self.ledger.entries[request.id] = Entry(request, self._sink, 0.0, math.inf)

    @rule()
    def dispatch(self) -> None:
        suspects = [entry.request.id for entry in self.ledger.suspects]
        busy = self.ledger.in_child
        sent = list(self.ledger.dispatch())
        if suspects:
            assert [entry.request.id for entry in sent] == ([] if busy else suspects[:1])
        if self.ledger.alone is not None:
            assert [entry for entry in self.ledger.entries.values() if entry.stage != "held"] == [self.ledger.alone]

    @rule(number=st.integers(0, 9), stage=st.sampled_from(["preparing", "prepared", "started"]))
    def move(self, number: int, stage: str) -> None:
        if entry := self._in_child(number):
            self.ledger.move(entry.request.id, stage)  # type: ignore[arg-type]

    @rule(number=st.integers(0, 9))
    def token(self, number: int) -> None:
        entry = self._in_child(number)
        if entry and entry.stage == "started":
            self.ledger.tell(entry, Delta(entry.request.id, "x", (Token(1, "x", b"x"),)))

    @rule(number=st.integers(0, 9))
    def finish(self, number: int) -> None:
        if entry := self._in_child(number):
            self.ledger.remove(entry)
            self.ledger.tell(entry, cancelled(entry))

    @rule(number=st.integers(0, 9))
    def expire(self, number: int) -> None:
        if entry := self._in_child(number):
            self.ledger.tell(entry, Failed(entry.request.id, EngineRestartedError("late")))

    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        if entry := self._in_child(number):
            entry.cancelled = True

    @rule()
    def die(self) -> None:
        tokens = {entry.request.id: entry.tokens for entry in self.ledger.entries.values()}
        alone = {entry.request.id: entry.deaths_alone for entry in self.ledger.entries.values()}
        for entry, event in self.ledger.after_death(HOW):
            told = entry.told
            self.ledger.tell(entry, event)
            if not told and isinstance(event, Failed):
                name = entry.request.id
                assert tokens[name] or alone[name] == DEATHS_ALONE - 1
                assert isinstance(event.error, EngineRestartedError if tokens[name] else PoisonError)
        assert all(entry.stage == "held" and not entry.tokens for entry in self.ledger.entries.values())

    @invariant()
    def each_ends_once_and_none_is_forgotten(self) -> None:
        assert all(count == 1 for count in self.ends.values())
        for request in self.submitted:
            assert (request.id in self.ends) != (
                request.id in self.ledger.entries and not self.ledger.entries[request.id].told
            )
        assert sum(self.ledger.finished.values()) == len(self.ends)
        assert all(entry.request.id in self.ledger.entries for entry in self.ledger.suspects)

    def _in_child(self, number: int) -> Entry | None:
        entries = [entry for entry in self.ledger.entries.values() if entry.stage != "held"]
        return entries[number % len(entries)] if entries else None

    def _sink(self, event: Event) -> None:
        assert event.request_id not in self.ends, "nothing follows the last event"
        if isinstance(event, Finished | Failed):
            self.ends[event.request_id] += 1


def test_the_ledger_holds_for_any_child() -> None:
    run_state_machine_as_test(Book, settings=settings(max_examples=80, stateful_step_count=40, deadline=None))


def test_a_request_is_poison_only_by_what_it_did_alone() -> None:
    ledger = Ledger()
    entries = [Entry(ask(str(n)), lambda event: None, 0.0, math.inf) for n in range(3)]
    ledger.entries = {entry.request.id: entry for entry in entries}

    def die(*started: Entry) -> list[tuple[Entry, Event]]:
        for entry in started:
            ledger.move(entry.request.id, "started")
        return ledger.after_death(HOW)

    assert len(list(ledger.dispatch())) == 3
    assert die(*entries[:2]) == [], "one of two did it"
    for count in range(DEATHS_ALONE):
        (alone,) = ledger.dispatch()
        assert alone is entries[0]
        assert list(ledger.dispatch()) == [], "the others wait"
        ends = die(alone)
        assert [entry for entry, _ in ends] == ([alone] if count == DEATHS_ALONE - 1 else [])
    (_, event) = ends[0]
    assert isinstance(event, Failed)
    with pytest.raises(PoisonError, match=f"2 times while it served request {entries[0].request.id}"):
        raise event.error
    (alone,) = ledger.dispatch()
    assert alone is entries[1]
    ledger.remove(alone)
    assert list(ledger.dispatch()) == [entries[2]]
