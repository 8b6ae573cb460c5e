"""Token ids -> text, a token at a time: bytes to whole characters, and stop strings that never leak.

    id -> bytes (a table) -> ByteDetokenizer -> certain text -> StopStrings -> text that may be sent

A token is a run of bytes, not of characters: an emoji can be spread over four tokens, so decoding ids one by one tears it
apart. Decoding the whole reply again for each token is right but quadratic. Here bytes go through the incremental UTF-8 decoder
of the standard library, which holds back an unfinished character and nothing else; streamed and whole text are equal
by construction. Text knows nothing of stop strings, stop strings nothing of tokens, so each can be tested alone.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kaminari_core.errors import CheckpointError, RequestError


class ByteDetokenizer:
    """A `protocols.Detokenizer` over a table of each token's bytes.

    Ids that the table does not hold add nothing, as padding of a vocabulary does. Bytes that are no UTF-8 become U+FFFD exactly
    as `bytes.decode("utf-8", "replace")` of the whole reply has it.
    """

    def __init__(self, vocabulary: Mapping[int, bytes]) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take one token and return the text that is now certain: whole characters only, possibly empty."""
        return self._decoder.decode(self.token_bytes(token))

    def flush(self) -> str:
        """Return what is held back at the end; bytes that are no character become U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds to the text; empty for special tokens."""
        return self._vocabulary.get(token, b"")


class ByteLevelTokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that `byte_level_vocabulary` reads."""

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Token strings and their ids."""
        ...

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """Ids and their added tokens, which have `content` and `special`."""
        ...


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level BPE token stands for.

    The map of `bytes_to_unicode` in openai/gpt-2, src/encoder.py: printable Latin-1 characters stand for themselves, the other
    68 bytes for the characters from U+0100 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


def byte_level_vocabulary(tokenizer: ByteLevelTokenizer) -> dict[int, bytes]:
    """The bytes of each token of a byte-level BPE tokenizer (GPT-2, Qwen, GLM).

    Special tokens add no bytes to the text. Other added tokens, such as tags that a model writes for its readers, are plain
    text. Raises CheckpointError for a vocabulary that is not byte-level.
    """
    alphabet = byte_level_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    table = {token: b"" if each.special else each.content.encode() for token, each in added.items()}
    for text, token in tokenizer.get_vocab(with_added_tokens=False).items():
        if token in table:
            continue
        try:
            table[token] = bytes(alphabet[character] for character in text)
        except KeyError as error:
            raise CheckpointError(
                f"token {token} of the tokenizer is {text!r}, and {error.args[0]!r} is no letter of the byte-level "
                "alphabet; only byte-level BPE tokenizers are supported"
            ) from error
    return table


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    What has been returned never has to be taken back: the tail that could still turn out to be the beginning of a stop
    string is held. The text ends before the earliest occurrence of any stop string, wherever the pieces were cut; so when a
    short one is complete inside a longer one that began earlier and may still complete, that is waited for. Each stop
    string is matched by the Knuth-Morris-Pratt automaton: the cost per character does not depend on lengths.

    `hit` is True once the end has been found; nothing is returned from then on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise RequestError("a stop string is empty; leave it out", param="stop")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._sent = 0
        self._end: int | None = None
        self.hit = False

    def push(self, text: str) -> str:
        """Take text and return what may be sent."""
        if self.hit:
            return ""
        if not self._matchers:
            return text
        start = self._sent + len(self._held)
        self._held += text
        for position, character in enumerate(text, start + 1):
            for matcher in self._matchers:
                begin = matcher.feed(character, position)
                if begin is not None and (self._end is None or begin < self._end):
                    self._end = begin
            if self._end is not None and all(matcher.begin >= self._end for matcher in self._matchers):
                self.hit = True
                return self._send(self._end, keep=False)
        safe = min(matcher.begin for matcher in self._matchers)
        return self._send(safe if self._end is None else min(safe, self._end))

    def flush(self) -> str:
        """Return what is held at the end of the text; sets `hit` if a complete stop string is in it."""
        if self.hit:
            return ""
        self.hit = self._end is not None
        return self._send(self._sent + len(self._held) if self._end is None else self._end, keep=False)

    def _send(self, position: int, *, keep: bool = True) -> str:
        """Cut the held text at a position of the whole text; what follows is kept or dropped."""
        cut = position - self._sent
        text, self._held = self._held[:cut], self._held[cut:] if keep else ""
        self._sent = position
        return text


class _Matcher:
    """One stop string. `begin` is where the longest beginning of it that ends here starts, or the position itself."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = _borders(stop)
        self._matched = 0
        self.begin = 0

    def feed(self, character: str, position: int) -> int | None:
        """Take the character before `position`; returns where the stop string begins if it is complete now."""
        matched = self._matched
        while matched and self._stop[matched] != character:
            matched = self._fallback[matched - 1]
        if self._stop[matched] == character:
            matched += 1
        complete = position - matched if matched == len(self._stop) else None
        self._matched = matched if complete is None else self._fallback[matched - 1]
        self.begin = position - self._matched
        return complete


def _borders(word: str) -> list[int]:
    """For each prefix of the word, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for index in range(1, len(word)):
        while length and word[index] != word[length]:
            length = borders[length - 1]
        if word[index] == word[length]:
            length += 1
        borders[index] = length
    return borders
