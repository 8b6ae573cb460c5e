"""A byte-level BPE vocabulary of 390 tokens, trained on a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level(corpus: Sequence[str]) -> Tokenizer:
    """Train a tokenizer on some lines; every byte has a token."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=390, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(corpus, trainer)
    return trained
