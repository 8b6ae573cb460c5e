"""The loop guard against its formula, what it keeps and what it ends, and the promises of a reply that it watches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaminari_core.cache import StaticCache
from kaminari_core.config import EngineConfig
from kaminari_core.engine import Engine
from kaminari_core.evidence.facts import Repeat
from kaminari_core.evidence.loops import LONGEST, LoopGuard, guard_for, shortest_loop
from kaminari_core.flow import Delta, Finished, ImagePart, Message, Request, Result, Sampling, TextPart
from kaminari_core.reply import Reply
from kaminari_core.scheduler import ContinuousScheduler
from kaminari_core.structured.structure import Structure
from kaminari_core.tasks import task_of
from kaminari_core.testing import END_TOKEN, TOKEN_BYTES, EchoModel
from kaminari_core.text import ByteDetokenizer

PIECES = [b"a", b"b", b".", b" ", b"_", b"\n", b"<td>", b"</td>", b"0", b"\xe2\x82", b"\xac", b"|", b""]


def tail_of(tokens: Sequence[int], period: int) -> int:
    """How many tokens at the end have this period: the definition, read from the end."""
    length = min(period, len(tokens))
    while length < len(tokens) and tokens[-1 - length] == tokens[-1 - length + period]:
        length += 1
    return length


def characters_in(data: bytes) -> int:
    """How many characters begin in these bytes."""
    return sum(byte & 0b1100_0000 != 0b1000_0000 for byte in data)


def loop_in(tokens: Sequence[int]) -> Repeat | None:
    """The formula of the documentation, for all tokens at once."""
    for period in range(1, LONGEST + 1):
        length = tail_of(tokens, period)
        first = len(tokens) - length
        characters = sum(characters_in(PIECES[token]) if PIECES[token] else 1 for token in tokens[first:])
        if length < 4 * period or characters < 256:
            continue
        if characters >= shortest_loop(b"".join(PIECES[token] for token in tokens[first : first + period])):
            return Repeat(period, length // period, first + period)
    return None


@st.composite
def replies(draw: st.DrawFn) -> list[int]:
    """Some tokens, then units that are repeated now and then, some of them broken off."""
    token = st.integers(0, len(PIECES) - 1)
    tokens = draw(st.lists(token, max_size=20))
    for _ in range(draw(st.integers(1, 3))):
        seed, size = draw(st.integers(0, 2**32)), draw(st.sampled_from([1, 2, 3, 7, 30, 85, 86, 200, 256, 257]))
        letters = draw(st.lists(token, min_size=1, max_size=4))
        unit = [random.Random(seed + place).choice(letters) for place in range(size)]
        length = draw(st.integers(1, 1100))
        tokens += (unit * (length // size + 1))[:length]
    return tokens


@given(replies())
@settings(max_examples=40, deadline=None)
def test_the_guard_finds_what_the_formula_finds_at_the_same_token(tokens: list[int]) -> None:
    guard = LoopGuard()
    for end, token in enumerate(tokens, 1):
        held = guard.push(token, PIECES[token])
        if end % 128 == 0 or guard.found:
            tails = [tail_of(tokens[:end], period) - period for period in range(1, min(LONGEST, end - 1) + 1)]
            assert held == max([0, *tails])
            assert guard.found == loop_in(tokens[:end])
        if guard.found:
            assert loop_in(tokens[: end - 1]) is None
            return
    assert loop_in(tokens) is None


@pytest.mark.parametrize(
    ("copy", "characters"),
    [
        (". ", 256), ("____", 256), ("the the ", 256),
        ("Milk 1.20\n", 512), ("<td>0.00 EUR</td>", 512), ("| total | 1 |\n", 512), ("x & 1 \\\\", 512), ("\u724c\n", 512),
        ("<td></td>", 2048), ("d></td><t", 2048), ("td></td><", 2048), ("| | |\n", 2048), ("0.00\n", 2048), ("\n", 2048),
        ("____\n", 2048), ("& & \\\\", 2048),
    ],
)  # fmt: skip
def test_what_one_copy_says_decides_how_long_a_loop_must_be(copy: str, characters: int) -> None:
    assert shortest_loop(copy.encode()) == characters
    assert shortest_loop(copy.encode() * 3) == characters
    turned = copy.encode()[1:] + copy.encode()[:1]
    assert shortest_loop(turned) == characters, "also where a character, a tag or a mark is cut"


def reply_of(text: str, *, stop: tuple[str, ...] = (), limit: int = 10_000) -> Reply:
    """A guarded reply that has taken these bytes as tokens."""
    reply = Reply(ByteDetokenizer(TOKEN_BYTES), stop, {END_TOKEN}, limit, "max_tokens", LoopGuard())
    said, tokens = "", []
    for byte in text.encode():
        new, released = reply.take(byte)
        said += new
        tokens += released
        assert reply.text == said
        if reply.ended:
            break
    if not reply.ended:
        new, released = reply.take(END_TOKEN)
        said, tokens = said + new, tokens + list(released)
    assert reply.text == said
    assert tokens == reply.tokens
    return reply


TABLE = (
    "<table>" + "".join(f"<tr><td>{name}</td><td>1.20</td></tr>" for name in ("Milk", "Rye", "Rye", "Rye")) + "</table>"
)
TRUE = [
    "Milk 1.20\nMilk 1.20\nMilk 1.20\nTOTAL 3.60",
    TABLE,
    "Contents" + " ." * 70 + " 12\nIndex" + "." * 200 + "99",
    "Name: " + "_" * 80 + "\nDate: " + "_" * 80,
    "<table>" + ("<tr>" + "<td></td>" * 4 + "</tr>") * 20 + "</table>",
    "| a | b |\n|---|---|\n" + "| | |\n" * 40,
    "\n".join(["0.00"] * 60),
    "ha " * 60,
]


@pytest.mark.parametrize("text", TRUE)
def test_true_repetitions_are_kept_to_the_last_character(text: str) -> None:
    reply = reply_of(text)
    assert (reply.text, reply.finish, reply.repeat) == (text, "end_token", None)


LOOPS = [
    ("Total 12.40\n", "Thank you, come again!\n"),
    ("", "."),
    ("Preface ", ". "),
    ("<table>", "<tr><td></td><td></td></tr>"),
    ("", "Der Umsatz stieg im letzten Quartal um acht Prozent, wie der Vorstand am Montag in Frankfurt mitteilte. "),
    ("price \u20ac ", "\u20ac1 "),
    ("", "x" * 250 + "\n"),
]


@pytest.mark.parametrize(("before", "unit"), LOOPS)
def test_a_loop_ends_with_its_first_copy(before: str, unit: str) -> None:
    # What precedes may end as the unit does: then the repetition begins there, and its first copy ends earlier.
    shared = next(size for size in range(len(unit), -1, -1) if before.endswith(unit[len(unit) - size :]))
    period, tail = len(unit.encode()), (unit[len(unit) - shared :] + unit * 2000).encode()
    needed = next(
        size for size in itertools.count(4 * period) if characters_in(tail[:size]) >= shortest_loop(unit.encode())
    )
    reply = reply_of(before + unit * 2000)
    assert reply.text == (before + unit)[: len(before + unit) - shared]
    assert reply.finish == "loop"
    assert reply.repeat == Repeat(period, needed // period, len(reply.tokens))
    assert reply.generated == len(before.encode()) - shared + needed


def test_a_copy_that_ends_inside_a_character_gives_no_half_of_it() -> None:
    reply = reply_of("\u20ac" * 300)
    assert (reply.text, reply.finish) == ("\u20ac", "loop")
    half = reply_of("\u00ac" + "\u20ac" * 300)
    assert half.finish == "loop"
    assert half.text == "\u00ac\u20ac"[: len(half.text)]
    assert "\ufffd" not in half.text


def test_a_stop_string_ends_a_reply_inside_a_repetition_at_once() -> None:
    reply = reply_of("a" + "b " * 50 + "END" + "c" * 600, stop=("END",))
    assert (reply.text, reply.finish, reply.generated) == ("a" + "b " * 50, "stop_string", 104)


def test_a_stop_string_that_begins_in_the_kept_copy_is_not_lost() -> None:
    """The text from "ab" on waits for a stop string that never completes; the loop is cut where it always is."""
    reply = reply_of("xy" + "ab" * 600, stop=("ab" * 400 + "!",))
    assert (reply.text, reply.finish) == ("xyab", "loop")
    complete = reply_of("xy" + "ab" * 600, stop=("yab", "xyabab" + "ab" * 300))
    assert (complete.text, complete.finish) == ("x", "stop_string")


def test_the_limit_inside_a_repetition_cuts_nothing_else() -> None:
    reply = reply_of("." * 1000, limit=200)
    assert (reply.text, reply.finish) == ("." * 200, "max_tokens")


def test_cancelling_gives_back_what_was_held() -> None:
    reply = Reply(ByteDetokenizer(TOKEN_BYTES), (), (), 100, "max_tokens", LoopGuard())
    sent = "".join(reply.take(byte)[0] for byte in b"abcabcab")
    text, tokens = reply.cancel()
    assert (sent, text, len(tokens)) == ("abc", "abcab", 5)


def test_what_breaks_off_is_released_with_the_token_that_breaks_it() -> None:
    reply = Reply(ByteDetokenizer(TOKEN_BYTES), (), (), 100, "max_tokens", LoopGuard())
    assert [reply.take(byte)[0] for byte in b"abcabdx"] == ["a", "b", "c", "", "", "abd", "x"]


def ask(text: str, **fields: object) -> Request:
    return Request((Message("user", (TextPart(text),)),), max_tokens=1000, **fields)  # type: ignore[arg-type]


TASKS = {"ocr": "Read this:", "caption": "Describe", "extract": "Fill in:\n{template}"}


def test_tasks_that_read_are_guarded_and_nothing_else_unless_it_asks() -> None:
    config, picture = EngineConfig(), ImagePart(b"")
    request = ask("Read this:")
    assert task_of(request, TASKS) == "ocr"
    assert task_of(ask('Fill in:\n{"a": ""}'), TASKS) == "extract"
    assert task_of(replace(request, messages=(Message("user", (picture, TextPart(" \n"))),)), TASKS) == "ocr"
    assert task_of(replace(request, messages=(Message("user", (picture,)),)), {}) is None
    assert task_of(ask("Read this: or that"), TASKS) is None
    guarded = [ask("Read this:"), ask('Fill in:\n{"a": ""}'), ask("say", task="table"), ask("say", loop_guard=True)]
    free = [ask("say"), ask("Describe"), ask("Read this:", loop_guard=False), ask("Read this:", ignore_end=True)]
    assert all(guard_for(each, config, TASKS) for each in guarded)
    assert not any(guard_for(each, config, TASKS) for each in free)
    off = EngineConfig(loop_guard=False)
    assert [bool(guard_for(each, off, TASKS)) for each in guarded] == [False, False, False, True]


SCRIPT = "Invoice 12\n" + "Milk 1.20\n" * 60


def served(request: Request, **changes: object) -> tuple[Result, str, list[object]]:
    """Serve a request, with its stream's text and tokens; the model says SCRIPT, whatever it is asked."""
    config = EngineConfig(compile=False, max_length=2048, slots=2, **changes)  # type: ignore[arg-type]
    model = EchoModel(config, lambda request: [*SCRIPT.encode(), END_TOKEN])
    width = config.draft_tokens + 1
    cache = StaticCache(model.shape, 2, 2048, model.device, model.dtype, width=width)
    text, tokens = "", []
    with Engine("test", model, cache, ContinuousScheduler(config), config, tasks=TASKS) as engine:
        for event in engine.stream(request):
            if isinstance(event, Delta):
                text += event.text
                tokens += event.tokens
            elif isinstance(event, Finished):
                return event.result, text, tokens
            else:
                raise AssertionError(event)
    raise AssertionError("the stream ended without a result")


@pytest.mark.parametrize("draft", ["none", "prompt-lookup"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.01, seed=1)], ids=["greedy", "drawn"])
def test_an_engine_ends_a_loop_the_same_way_with_guesses_and_without(draft: str, sampling: Sampling) -> None:
    result, text, tokens = served(
        ask("Read this:", sampling=sampling, confidence=True), draft=draft, draft_tokens=5, draft_auto=False
    )
    assert text == result.text == "Invoice 12\nMilk 1.20"
    assert (result.finish_reason, result.finish_detail) == ("stop", "loop")
    assert list(result.tokens) == tokens
    assert result.repeat == Repeat(10, 51, 20)
    # The line break in front of the first copy is the last token of every copy, so the repetition begins with it.
    assert result.usage.completion_tokens == 10 + 512
    assert result.confidence is not None
    assert [line.text for line in result.confidence.lines] == ["Invoice 12", "Milk 1.20"]
    if draft != "none":
        assert result.drafts.accepted > 100, "several tokens a step did pass the guard"


def test_a_structure_that_allows_a_loop_is_not_complete_when_it_is_cut_and_is_when_it_ends() -> None:
    structure = Structure.regex(r"Invoice 12\n(Milk 1.20\n)*")
    kept, _, _ = served(ask("Read this:", structure=structure))
    assert (kept.finish_detail, kept.complete) == ("end_token", True), "a structure is not cut unless that is asked for"
    cut, _, _ = served(ask("Read this:", structure=structure, loop_guard=True))
    assert (cut.finish_detail, cut.complete) == ("loop", False)
    # The 51st copy is the last that fits the pattern and makes the repetition long enough.
    ending = Structure.regex(r"Invoice 12\n(Milk 1.20\n){51}M")
    whole, _, _ = served(ask("Read this:", structure=ending, loop_guard=True))
    assert (whole.finish_detail, whole.complete) == ("structure_complete", True)
    assert whole.text == SCRIPT[: 11 + 51 * 10 + 1]


def test_without_a_guard_the_same_reply_goes_on() -> None:
    result, text, tokens = served(ask("something else"))
    assert (result.text, result.finish_detail, result.repeat) == (SCRIPT, "end_token", None)
    assert text == SCRIPT
    assert list(result.tokens) == tokens
