"""Compiles the structures of requests into constraints, once for each content. Used from worker threads.

What a grammar lets through is narrower than JSON in one point: between two JSON tokens there may be one space, or one line
break with up to 16 blanks or tabs. Nothing else bounds whitespace, and a model that falls into it would write it until its
token limit.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from kaminari_core.errors import RequestError
from kaminari_core.protocols import Model
from kaminari_core.structured.constraint import Constraint, broken
from kaminari_core.structured.schema import check_enforceable, close_objects
from kaminari_core.structured.structure import CODE, Structure
from kaminari_core.structured.vocabulary import build_tokenizer, require_llguidance

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_WORDS = 400
"""Characters of an explanation. Some of llguidance's show a whole automaton."""
MOST_GRAMMARS = 64
"""Compiled grammars that one engine keeps; beyond it, the one that was not used for longest is dropped."""
WHITESPACE = r"( |\r?\n[ \t]{0,16})"
# Otherwise text that the grammar leaves no choice about would have to be cut into tokens here instead of by the model.
_HEADER = '%llguidance {"no_forcing": true}\nstart: '


def check_structure(structure: Structure) -> None:
    """Raise RequestError where no grammar can be made of a structure, as far as that can be told without a model."""
    require_llguidance()
    from llguidance import LLMatcher

    is_invalid, messages = LLMatcher.validate_grammar_with_warnings(_HEADER + _rule(structure))
    if is_invalid:
        raise _refusal(structure, messages[0])


class Grammars:
    """The compiled grammars of one engine."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._building = threading.Lock()

    def __len__(self) -> int:
        return len(self._compiled)

    def constraint(self, structure: Structure) -> Constraint:
        """A constraint at its beginning, for one reply.

        Raises RequestError with llguidance's words for a structure that cannot be enforced, UsageError without llguidance.
        """
        key = structure.kind, structure.text
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return self._begin(matcher)
        compiled = self._compile(structure)
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
            return self._begin(compiled)

    def _begin(self, matcher: LLMatcher) -> Constraint:
        return Constraint(matcher.deep_copy(), frozenset(self._model.shape.end_tokens))

    def _compile(self, structure: Structure) -> LLMatcher:
        tokenizer = self._ready_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, _HEADER + _rule(structure), log_level=0, limits=limits)
        if not broken(matcher):
            # The first mask is the slowest, and it tells whether any token of this vocabulary can begin the reply.
            matcher.compute_bitmask()
        if broken(matcher):
            raise _refusal(structure, matcher.get_error() or "no reply could satisfy it")
        return matcher

    def _ready_tokenizer(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(self._model.shape, self._model.detokenizer())
            return self._tokenizer


def _rule(structure: Structure) -> str:
    """The right-hand side of a rule of llguidance's grammar language. Raises RequestError."""
    if structure.kind == "json_schema":
        schema = close_objects(json.loads(structure.text))
        check_enforceable(schema, structure.name)
        # The options that a schema may bring along could turn off what is promised here.
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return "%json " + json.dumps(schema | options, ensure_ascii=False)
    if structure.kind == "regex":
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(structure.text, 'd')}/"
    return " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(structure.text))


def _refusal(structure: Structure, words: str) -> RequestError:
    """llguidance's words without the places in the grammar that was made around the structure."""
    words = re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", words)
    words = re.sub(r"\n +\d+ \| .*", "", words, flags=re.DOTALL).strip()
    words = words if len(words) <= MOST_WORDS else words[:MOST_WORDS] + "..."
    return RequestError(f"{structure.name} cannot be enforced: {words}", param=structure.name, code=CODE)
