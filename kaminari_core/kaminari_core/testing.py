"""Small real models for tests, of the engine and of plugins' own code; they need no checkpoint and no tokenizer.

`EchoModel` replies with the bytes of the last message, read back from the cache row it was stored in: what it says proves that
slots, moves and cursors are right, and a test decides the reply, byte for byte. `TinyModel` is a decoder with random weights
and a linear picture tower, for everything that needs arithmetic: compiled steps, buckets, equality of solo and batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kaminari_core.config import EngineConfig
from kaminari_core.errors import PromptTooLongError
from kaminari_core.flow import Embedded, ImagePart, Prepared, Request, Sampling, Saw, TextPart
from kaminari_core.layers import Attention, Decoder, GatedMLP, RMSNorm
from kaminari_core.patches import ImageProcessor
from kaminari_core.protocols import Cache, LayerCall, ModelShape, Step
from kaminari_core.rope import half_split_table, inverse_frequencies, rotate_half_split
from kaminari_core.text import ByteDetokenizer

END_TOKEN = 256
PICTURE_TOKEN = 257
TURN_TOKEN = 258
VOCABULARY = 259
TOKEN_BYTES = {byte: bytes([byte]) for byte in range(256)}


def echo_script(request: Request) -> list[int]:
    """The bytes of the last message's text, then the end token."""
    text = "".join(part.text for part in request.messages[-1].parts if isinstance(part, TextPart))
    return [*text.encode(), END_TOKEN]


class EchoModel:
    """Says what `script(request)` lists, one token per step, having stored it in the cache at prefill.

    The script is the prompt: token i lies at cache position i, in keys, and the length at position 0, in values. A step whose
    cursor is c says token c - length + 1; past the end it repeats the end token.
    """

    def __init__(self, config: EngineConfig, script: Callable[[Request], Sequence[int]] = echo_script) -> None:
        self.shape = ModelShape(
            layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, vocabulary=VOCABULARY,
            max_positions=config.max_length, end_tokens=(END_TOKEN,),
        )  # fmt: skip
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.sampling_defaults = Sampling()
        self._config, self._script = config, script

    def prepare(self, request: Request) -> Prepared:
        """The script as the prompt."""
        started = time.monotonic()
        tokens = tuple(self._script(request))
        _check_length(len(tokens), self._config.max_length)
        return Prepared(
            request, tokens, torch.arange(len(tokens))[None], len(tokens), seconds=time.monotonic() - started
        )

    def embed(self, prepared: Prepared) -> Embedded:
        """Token ids as one-wide hidden states."""
        return Embedded(torch.tensor(prepared.tokens, dtype=torch.float32)[:, None], prepared.positions)

    def prefill(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> Tensor:
        """Store the script and say its first token."""
        cache.keys[0, slot, 0, start:stop] = embedded.hidden[start:stop]
        cache.values[0, slot, 0, 0] = embedded.hidden.shape[0]
        return one_hot(cache.keys[0, slot, 0, 0, 0].long())

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> Tensor:
        """Say the script's next token, looked up in each row's own cache row."""
        rows = step.cursors.shape[0]
        lengths = cache.values[0, :rows, 0, 0, 0].long()[:, None]
        following = step.cursors - lengths + 1
        script = cache.keys[0, :rows, 0, :, 0].long()
        said = script.gather(1, following.clamp(min=0, max=script.shape[1] - 1))
        return one_hot(torch.where(following < lengths, said, END_TOKEN))

    def detokenizer(self) -> ByteDetokenizer:
        """Token n below 256 is the byte n."""
        return ByteDetokenizer(TOKEN_BYTES)


class TinyBlock(nn.Module):
    """A pre-norm decoder layer of 64 features, 4 query heads and 2 kv heads of size 32."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(64, 4, 2, 32, rotate_half_split, norm_eps=1e-6)
        self.mlp = GatedMLP(64, 128)
        self.attention_norm, self.mlp_norm = RMSNorm(64, 1e-6), RMSNorm(64, 1e-6)

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """See layers.Block."""
        hidden = hidden + self.attention.prefill(self.attention_norm(hidden), cos, sin, keys, values, start)
        mixed: Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + mixed

    def decode(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, cursors: Tensor, mask: Tensor
    ) -> Tensor:
        """See layers.Block."""
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention.decode(normed, cos, sin, keys, values, cursors, mask)
        mixed: Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + mixed


class TinyModel:
    """A two-layer byte decoder with random weights that are peaked enough for greedy replies to vary and have clear margins.

    A picture becomes one token per 32 x 32 pixels: the flattened patches times a random matrix.
    """

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        self.shape = ModelShape(
            layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, vocabulary=VOCABULARY,
            max_positions=config.max_length, end_tokens=(END_TOKEN,), image_unit=32, min_visual_tokens=4,
        )  # fmt: skip
        self.device = torch.device("cpu" if config.device == "auto" else config.device)
        self.dtype = torch.float32
        self.sampling_defaults = Sampling()
        self._config = config
        self._pictures = ImageProcessor(
            patch_size=16, merge_size=2, temporal_patch_size=2, mean=(0.5,) * 3, std=(0.5,) * 3,
            min_tokens=4, max_tokens=256, config=config,
        )  # fmt: skip
        self.decoder = Decoder(
            [TinyBlock(), TinyBlock()], vocabulary=VOCABULARY, hidden=64, norm_eps=1e-6,
            axes=[0] * 16, table=half_split_table, group=2,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.decoder.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.25 if parameter.ndim > 1 else 1 + 0.1 * noise)
        self.decoder.requires_grad_(False).to(self.device)
        self.decoder.set_rotary(inverse_frequencies(32, 10_000.0, self.device), config.max_length, self.dtype)
        self._tower = (torch.randn(4 * 3 * 2 * 16 * 16, 64, generator=generator) * 0.02).to(self.device)

    def prepare(self, request: Request) -> Prepared:
        """Each message is a turn token and its parts in order: bytes of text, placeholders of pictures."""
        started = time.monotonic()
        parts = [part for message in request.messages for part in message.parts]
        patches, saw = self._pictures.see([part for part in parts if isinstance(part, ImagePart)])
        remaining = iter(saw)
        tokens: list[int] = []
        for message in request.messages:
            tokens.append(TURN_TOKEN)
            for part in message.parts:
                if isinstance(part, ImagePart):
                    tokens += [PICTURE_TOKEN] * next(remaining).visual_tokens
                else:
                    tokens += part.text.encode()
        _check_length(len(tokens), self._config.max_length, saw)
        return Prepared(
            request, tuple(tokens), torch.arange(len(tokens))[None], len(tokens),
            patches=patches, saw=saw, seconds=time.monotonic() - started,
        )  # fmt: skip

    def embed(self, prepared: Prepared) -> Embedded:
        """Embeddings of the prompt, with the pictures' features at their placeholders."""
        ids = torch.tensor(prepared.tokens, device=self.device)
        hidden = self.decoder.embed_tokens(ids)
        if prepared.patches:
            pixels = torch.cat([patches.values.reshape(-1, self._tower.shape[0]) for patches in prepared.patches])
            hidden[ids == PICTURE_TOKEN] = pixels.to(self.device) @ self._tower
        return Embedded(hidden, prepared.positions.to(self.device))

    def prefill(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> Tensor:
        """See protocols.Model."""
        return self.decoder.prefill(embedded, start, stop, cache, slot)

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> Tensor:
        """See protocols.Model."""
        return self.decoder.decode(step, cache, layer_call)

    def detokenizer(self) -> ByteDetokenizer:
        """Token n below 256 is the byte n."""
        return ByteDetokenizer(TOKEN_BYTES)


def _check_length(length: int, longest: int, saw: Sequence[Saw] = ()) -> None:
    if length > longest:
        raise PromptTooLongError(
            f"the prompt has {length} tokens, but one request may have {longest}; raise --max-length", length, saw
        )


def one_hot(tokens: Tensor) -> Tensor:
    """Logits that leave no doubt: float32 (..., VOCABULARY), one at the token and zero elsewhere."""
    return torch.nn.functional.one_hot(tokens, VOCABULARY).to(torch.float32)
