"""Incremental text against decoding and searching the whole."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from kaminari_core.errors import CheckpointError, RequestError
from kaminari_core.text import ByteDetokenizer, StopStrings, byte_level_alphabet, byte_level_vocabulary

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u010f \u6f22"


def stream(pieces: list[bytes]) -> list[str]:
    """The deltas of one token per piece; the last is what the flush releases."""
    detokenizer = ByteDetokenizer(dict(enumerate(pieces)))
    return [*(detokenizer.push(token) for token in range(len(pieces))), detokenizer.flush()]


def split(whole: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    return [whole[start:stop] for start, stop in itertools.pairwise(edges)]


@given(st.lists(st.binary(max_size=6)))
def test_any_bytes_give_what_whole_decoding_gives(pieces: list[bytes]) -> None:
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=30), st.lists(st.integers(0, 200)))
@example(FAMILY, list(range(100)))
def test_text_cut_anywhere_is_never_torn(text: str, cuts: list[int]) -> None:
    deltas = stream(split(text.encode(), cuts))
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text
    assert deltas[-1] == ""


def test_an_unfinished_character_is_held_until_it_is_certain() -> None:
    assert stream([b"\xf0\x9f", b"\x91", b"\xa9", b"a"]) == ["", "", "\U0001f469", "a", ""]
    assert stream([b"\xf0\x9f", b" b"]) == ["", "\ufffd b", ""]
    assert stream([b"a", b"\xff", b"b"]) == ["a", "\ufffd", "b", ""]
    assert stream([b"a", b"\xe6\xbc"]) == ["a", "", "\ufffd"]


def test_unknown_ids_add_nothing() -> None:
    detokenizer = ByteDetokenizer({5: b"five"})
    assert detokenizer.push(6) == ""
    assert detokenizer.push(5) == "five"
    assert detokenizer.token_bytes(6) == b""


def trained() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["total 12.50 total 7.20", "the cat and the hat"], trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def test_the_alphabet_is_the_tokenizers_librarys() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet) == sorted(ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["\u0120"] == ord(" ")
    assert alphabet["\u010a"] == ord("\n")


@given(st.text(max_size=40))
@example(FAMILY)
@example("total 12.50\n<think>the cat")
def test_tokens_decode_as_the_tokenizer_decodes(text: str) -> None:
    tokenizer = trained()
    table = byte_level_vocabulary(tokenizer)
    ids = tokenizer.encode(text).ids
    assert "".join(stream([table[token] for token in ids])) == tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_have_no_bytes_and_other_added_tokens_are_text() -> None:
    tokenizer = trained()
    table = byte_level_vocabulary(tokenizer)
    assert table[tokenizer.token_to_id("<|end|>")] == b""
    assert table[tokenizer.token_to_id("<think>")] == b"<think>"
    assert len(table) == tokenizer.get_vocab_size()


def test_a_vocabulary_of_words_is_refused() -> None:
    with pytest.raises(CheckpointError, match="byte-level"):
        byte_level_vocabulary(Tokenizer(WordLevel({"\u6f22": 0}, unk_token="\u6f22")))


def search(text: str, stops: list[str]) -> int | None:
    """Where the earliest stop string of the whole text begins."""
    found = [text.find(stop) for stop in stops if stop in text]
    return min(found) if found else None


def push_all(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.hit


few = st.text("ab\u6f22", max_size=24)


@given(few, st.lists(st.integers(0, 24)), st.lists(st.text("ab\u6f22", min_size=1, max_size=6), max_size=4))
@example("abcd", [1, 2, 3], ["abcd", "bc"])
@example("abcx", [1, 2, 3], ["abcd", "bc"])
@example("aab", [1, 2], ["ab"])
def test_any_cut_of_any_text_ends_before_the_earliest_stop(text: str, cuts: list[int], stops: list[str]) -> None:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    end = search(text, stops)
    assert push_all(pieces, stops) == (text if end is None else text[:end], end is not None)


@given(few, st.lists(st.text("ab\u6f22", min_size=1, max_size=6), min_size=1, max_size=4))
def test_no_more_is_held_than_could_begin_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    sent = ""
    for position, character in enumerate(text, 1):
        sent += matcher.push(character)
        if matcher.hit or search(text[:position], stops) is not None:
            break
        held = text[len(sent) : position]
        assert sent + held == text[:position]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_over_four_tokens_sends_nothing_of_itself() -> None:
    matcher = StopStrings(["DEFGHIJ"])
    assert [matcher.push(piece) for piece in ("abcDE", "F", "GHI", "Jklm", "after")] == ["abc", "", "", "", ""]
    assert matcher.hit
    assert matcher.flush() == ""


def test_text_held_at_the_end_is_released() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("wait ST") == "wait "
    assert matcher.flush() == "ST"
    assert not matcher.hit


def test_a_short_stop_waits_for_a_longer_one_that_began_earlier() -> None:
    matcher = StopStrings(["abcd", "bc"])
    assert matcher.push("xabc") == "x"
    assert not matcher.hit
    assert matcher.push("e") == "a"
    assert matcher.hit


def test_without_stops_text_passes() -> None:
    matcher = StopStrings([])
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


def test_long_outputs_and_long_stops_cost_linear_time() -> None:
    def seconds(characters: int) -> float:
        matcher = StopStrings(["a" * 5000 + "b", "c"])
        begun = time.process_time()
        for _ in range(characters // 10):
            matcher.push("a" * 10)
        return time.process_time() - begun

    seconds(1000)
    assert seconds(40_000) < 12 * max(seconds(10_000), 0.002)
