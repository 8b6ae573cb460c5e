"""GLM-OCR: a decoder with norms before and behind each half of a layer, pairwise rotation, contiguous M-RoPE sections, and a
multi-token prediction layer that serves as a draft head.

The shared parts (attention over the slot cache, the loop of layers) are the core's; what stands here is what makes it this model.
In every model package the files of this name can be read side by side.

Letters in shapes: S prompt positions, R rows, W new tokens of a row, H hidden size, D head size, V vocabulary, and K, T, slots
as in `kaminari_core.layers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from kaminari_core.config import EngineConfig
from kaminari_core.errors import CheckpointError
from kaminari_core.flow import Embedded, Prepared, Request
from kaminari_core.layers import Attention, Decoder, GatedMLP, RMSNorm, attention_mask
from kaminari_core.placement import resolve_dtype
from kaminari_core.protocols import Cache, Detokenizer, LayerCall, ModelShape, Progress, Step
from kaminari_core.rope import contiguous_axes, inverse_frequencies, pairwise_table, rotate_pairwise
from kaminari_core.weights import load_weights
from kaminari_glmocr.config import Config, TextConfig, read_config
from kaminari_glmocr.processor import Processor
from kaminari_glmocr.vision import VisionTower
from kaminari_glmocr.weights import TIES, check_draft, draft_copies, draft_patterns, rules


class Block(nn.Module):
    """One decoder layer: norm, attention, norm, add; norm, MLP, norm, add.

    The names are the checkpoint's and mislead: `post_attention_layernorm` stands before the MLP, and what stands behind the
    attention is `post_self_attn_layernorm`.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, rotate_pairwise)
        self.post_self_attn_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = GatedMLP(config.hidden, config.intermediate)
        self.post_mlp_layernorm = RMSNorm(config.hidden, config.norm_eps)

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Prompt positions [start, start + S) of one slot; see `kaminari_core.layers.Attention.prefill`."""
        attended = self.attention.prefill(self.input_layernorm(hidden), cos, sin, keys, values, start)
        return self._finish(hidden, attended)

    def decode(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, cursors: Tensor, mask: Tensor
    ) -> Tensor:
        """One step for all rows; see `kaminari_core.layers.Attention.decode`."""
        attended = self.attention.decode(self.input_layernorm(hidden), cos, sin, keys, values, cursors, mask)
        return self._finish(hidden, attended)

    def store(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int) -> None:
        """As `prefill`, where only the keys and values are wanted."""
        self.attention.store(self.input_layernorm(hidden), cos, sin, keys, values, start)

    def _finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.post_self_attn_layernorm(attended)
        mixed: Tensor = self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(hidden)))
        return hidden + mixed


class DraftHead(nn.Module):
    """The multi-token prediction layer: from the hidden state at position t and the token at t + 1 to the token at t + 2.

        block(eh_proj([enorm(embed_tokens(token)), hnorm(hidden)])) -> norm -> head

    The hidden state is the decoder's behind its final norm; a chained guess continues from the head's own, behind `norm`. So do
    SGLang and transformers' generic MtpLayer (arXiv:2412.19437, section 2.2, has the idea). The rotary position is that of t.
    """

    quantizable_heads: ClassVar[tuple[str, ...]] = ("head",)

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.enorm = RMSNorm(config.hidden, config.norm_eps)
        self.hnorm = RMSNorm(config.hidden, config.norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.block = Block(config)
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def join(self, following: Tensor, hidden: Tensor) -> Tensor:
        """The block's input (..., H) from the embeddings (..., H) of the next tokens and the hidden states (..., H)."""
        joined: Tensor = self.eh_proj(torch.cat((self.enorm(following), self.hnorm(hidden)), dim=-1))
        return joined


class Network(nn.Module):
    """The towers that a checkpoint's tensors fill; `draft` is None where the draft head is not used."""

    def __init__(self, config: Config, device: torch.device, *, draft: bool) -> None:
        super().__init__()
        text = config.text
        self.decoder = Decoder(
            [Block(text) for _ in range(text.layers)],
            vocabulary=text.vocabulary,
            hidden=text.hidden,
            norm_eps=text.norm_eps,
            axes=contiguous_axes(text.sections),
            table=pairwise_table,
            group=text.heads // text.kv_heads,
        )
        self.draft = DraftHead(text) if draft else None
        self.vision = VisionTower(config.vision, device)


class GlmOcr:
    """A loaded GLM-OCR: `kaminari_core.protocols.Model`, and a `DraftingModel` where the draft head is loaded."""

    def __init__(self, config: Config, network: Network, processor: Processor) -> None:
        text, pictures = config.text, config.pictures
        embedding = network.decoder.embed_tokens.weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.sampling_defaults = config.sampling
        self.shape = ModelShape(
            layers=text.layers,
            hidden=text.hidden,
            heads=text.heads,
            kv_heads=text.kv_heads,
            head_dim=text.head_dim,
            vocabulary=text.vocabulary,
            max_positions=text.max_positions,
            end_tokens=config.end_tokens,
            image_unit=pictures.unit,
            min_visual_tokens=pictures.min_tokens,
            draft_layers=0 if network.draft is None else 1,
        )
        self.network = network
        self._processor = processor
        self._image_token = config.image_token

    def prepare(self, request: Request) -> Prepared:
        """Check a request and turn it into model inputs. Raises RequestError with the `param` at fault."""
        return self._processor.prepare(request)

    @torch.inference_mode()
    def embed(self, prepared: Prepared) -> Embedded:
        """Embed the prompt, with each picture's features in the places of its image tokens, for the draft head too."""
        tokens = torch.tensor(prepared.tokens, device=self.device)
        hidden = self.network.decoder.embed_tokens(tokens)
        positions = prepared.positions.to(self.device)
        at = tokens == self._image_token
        if prepared.patches:
            # One picture at a time: attention does not cross pictures, and the peak is that of the largest one.
            features = [self.network.vision(patches) for patches in prepared.patches]
            hidden[at] = torch.cat(features).to(hidden.dtype)
        if self.network.draft is None:
            return Embedded(hidden, positions)
        following = torch.where(at[1:, None], hidden[1:], self.network.draft.embed_tokens(tokens[1:]))
        return Embedded(hidden, positions, following=following)

    @torch.inference_mode()
    def prefill(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> Tensor:
        """Run prompt positions [start, stop) of one slot; returns the logits (V,) of the last of them.

        The draft head's keys and values are stored as well, but for the prompt's last position, whose next token is yet to be
        generated.
        """
        decoder = self.network.decoder
        hidden = decoder.hidden_states(embedded, start, stop, cache, slot)
        if embedded.following is not None:
            self._store_draft(embedded, hidden, start, cache, slot)
        return decoder.next_token(hidden, cache, slot, ends=stop == len(embedded.hidden))

    def _store_draft(self, embedded: Embedded, hidden: Tensor, start: int, cache: Cache, slot: int) -> None:
        draft, layer = self.network.draft, self.shape.layers
        assert draft is not None and embedded.following is not None, "the draft head is not loaded"
        following = embedded.following[start : start + len(hidden)]
        if len(following) == 0:
            return
        known = slice(start, start + len(following))
        cos, sin = self.network.decoder.prompt_tables(embedded.positions[:, known], hidden.dtype)
        joined = draft.join(following, hidden[: len(following)])
        draft.block.store(joined, cos, sin, cache.keys[layer, slot], cache.values[layer, slot], start)

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> Tensor:
        """Run one step for all rows; returns the logits (R, W, V)."""
        return self.network.decoder.decode(step, cache, layer_call)

    def draft(self, step: Step, ends: Tensor, cache: Cache, layer_call: LayerCall) -> Tensor:
        """Guess one token further; see `kaminari_core.protocols.DraftingModel`. Returns the logits (R, V)."""
        draft, decoder, layer = self.network.draft, self.network.decoder, self.shape.layers
        assert draft is not None and cache.state is not None, "the draft head is not loaded"
        rows, width = step.tokens.shape
        cos, sin = decoder.step_tables(step)
        hidden = draft.join(draft.embed_tokens(step.tokens), cache.state[:rows, :width])
        mask = attention_mask(step, decoder.group)
        hidden = layer_call(draft.block, hidden, cos, sin, cache.keys[layer], cache.values[layer], step.cursors, mask)
        last = draft.norm(hidden[torch.arange(rows, device=self.device), ends])
        cache.state[:rows, 0] = last
        logits: Tensor = draft.head(last)
        return logits

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one reply."""
        return self._processor.detokenizer()


def load(checkpoint: Path, config: EngineConfig, device: torch.device, progress: Progress) -> GlmOcr:
    """Load a checkpoint directory; its multi-token prediction layer only for `config.draft` "mtp".

    Raises CheckpointError for anything in it that is missing, damaged or not supported, and UsageError when the draft head is
    asked for and there is none.
    """
    found = read_config(checkpoint)
    if found.vision.out_hidden != found.text.hidden:
        raise CheckpointError(
            f"config.json of {checkpoint} joins a vision tower of output {found.vision.out_hidden} to a decoder of "
            f"hidden size {found.text.hidden}"
        )
    drafting = config.draft == "mtp"
    if drafting:
        check_draft(checkpoint, found)
    processor = Processor(checkpoint, found, config)
    dtype = resolve_dtype(config.dtype, device, checkpoint)
    with torch.device("meta"):
        network = Network(found, device, draft=drafting)
    load_weights(
        network,
        checkpoint,
        rules(found, draft=drafting),
        device=device,
        dtype=dtype,
        ties=TIES if found.text.tied else {},
        copies=draft_copies(found) if drafting else {},
        ignore=() if drafting else draft_patterns(found),
        layout=config.kernels,
        progress=progress,
    )
    network.eval()
    frequencies = inverse_frequencies(found.text.head_dim, found.text.rope_theta).to(device)
    positions = min(config.max_length, found.text.max_positions)
    network.decoder.set_rotary(frequencies, positions, dtype)
    return GlmOcr(found, network, processor)
