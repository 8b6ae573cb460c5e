"""From a model's tokens to llguidance's tokenizer: the bytes of every token and which ones end a reply.

The bytes come from the model's own detokenizer, so this serves every plugin, whatever its tokenizer is. Nothing here can turn
text into tokens, and nothing has to: grammars are compiled so that they never force a tokenization of their own on the model,
only say which tokens may come next.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from kaminari_core.errors import UsageError
from kaminari_core.protocols import Detokenizer, ModelShape

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TokenTable:
    """The tokens of one model in the form that llguidance's TokenizerWrapper reads.

    Tokens without bytes (special ones, padding of the vocabulary) are never allowed, end tokens only where the grammar is
    satisfied. One token lies behind the vocabulary, so that it is never chosen: the end token of a model without one.
    """

    bos_token_id = None

    def __init__(self, shape: ModelShape, detokenizer: Detokenizer) -> None:
        self.end_tokens = shape.end_tokens or (shape.vocabulary,)
        self.tokens = [*map(detokenizer.token_bytes, range(shape.vocabulary)), b""]
        for token in self.end_tokens:
            self.tokens[token] = b""
        self.eos_token_id = self.end_tokens[0]

    def __call__(self, text: str | bytes) -> list[int]:
        """What llguidance would call to force a tokenization, which no grammar here does."""
        raise NotImplementedError("grammars force no tokenization")


def require_llguidance() -> None:
    """Raise UsageError where the library is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        raise UsageError(
            "structured output needs llguidance, which is not installed; pip install 'kaminari-core[structured]'"
        )


def build_tokenizer(shape: ModelShape, detokenizer: Detokenizer) -> LLTokenizer:
    """The tokenizer that llguidance matches with; takes about a second for 150,000 tokens.

    Raises UsageError where llguidance is not installed.
    """
    require_llguidance()
    from llguidance import LLTokenizer, TokenizerWrapper

    table = TokenTable(shape, detokenizer)
    return LLTokenizer(
        TokenizerWrapper(table),
        n_vocab=len(table.tokens),
        eos_token=list(table.end_tokens),
        slices=LLTokenizer.json_slices(),
    )
