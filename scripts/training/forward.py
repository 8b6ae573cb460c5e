"""A batched training forward over the modules of `Qwen3VLForConditionalGeneration`.

All pictures of a batch share one grid, so the vision attention is one dense call; grey pictures repeat one plane over
channels and frames, so the patch embedding is folded to that plane. `training.check` compares it with the library's own.

Shapes: B pictures, N patches each, V = N / 4 visual tokens, S sequence length, A answer length, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from make_pages import CHARACTERS
from training import prompt

CLASSES = len(CHARACTERS) + 1
SLOTS = 3
# (layer, head, step): the decoder head at a layer looks at the block of the character `step` places after the one it reads.
GUIDES = ((1, 0, 0), (2, 0, 1), (2, 2, 1))
# (layer, step): after a layer the state tells which patch of its visual token that character stands in. Narrowly set lines
# share a row of visual tokens, and nothing else tells the decoder which of the two it is on.
QUARTERS = ((1, 0), (2, 1))


@dataclass
class Draft:
    """What the multi-token prediction layer guesses of the answer's tokens after the first.

    `logits` (B, A - 1, vocabulary); `looking` (B, A - 1, V), the log-probabilities of its guided head.
    """

    logits: Tensor
    looking: Tensor


@dataclass
class Outputs:
    """What a training forward gives.

    `logits` (B, A, vocabulary) of the answer, the dense heads' logits, per guided head the log-probabilities of the visual
    tokens (B, A, V), and per layer of `QUARTERS` the logits (B, A, 4) of the patch within the visual token.
    """

    logits: Tensor | None
    patch_logits: Tensor
    block_logits: Tensor
    guides: list[Tensor]
    quarters: list[Tensor]
    draft: Draft | None = None


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate half-split pairs of the last dimension."""
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Attend in fp32 whatever autocast says: the backward of bf16 attention is five times slower on CPU."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
        )


def place_tokens(states: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
    """Put visual tokens (B * pictures, V, D) in place of the embeddings (B, S, D) at columns (pictures * V)."""
    return states.index_copy(1, columns, tokens.reshape(len(states), len(columns), -1).to(states.dtype))


def add_tokens(states: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
    """Add deepstack rows (B * pictures, V, D) to the states (B, S, D) at columns (pictures * V)."""
    return states.index_add(1, columns, tokens.reshape(len(states), len(columns), -1).to(states.dtype))


class Reader(nn.Module):
    """The model with the throw-away heads that training adds.

    What is particular to an architecture stands in `form`, `see`, `split` and `close`.
    """

    form = prompt.QWEN3VL

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.drafting = False
        # While true, the throw-away heads learn without a say in the rest: new ones would undo what a resumed model knows.
        self.settling = False
        visual = model.model.visual
        text = model.model.language_model
        convolution = visual.patch_embed.proj
        self.patch = nn.Linear(convolution.weight[0, 0, 0].numel(), convolution.out_channels)
        with torch.no_grad():
            self.patch.weight.copy_(convolution.weight.sum((1, 2)).flatten(1))
            self.patch.bias.copy_(convolution.bias)
        per_slot = CLASSES + 1
        self.patch_head = nn.Linear(visual.config.hidden_size, SLOTS * per_slot)
        self.block_head = nn.Linear(text.config.hidden_size, 4 * SLOTS * per_slot)
        self.quarter_heads = nn.ModuleList(nn.Linear(text.config.hidden_size, 4) for _ in QUARTERS)
        for head in (self.patch_head, self.block_head, *self.quarter_heads):
            for weight in head.parameters():
                nn.init.zeros_(weight)
        self.tables: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def fold_out(self) -> None:
        """Write the folded patch embedding back to the library's convolution."""
        convolution = self.model.model.visual.patch_embed.proj
        with torch.no_grad():
            shape = convolution.weight.shape
            plane = self.patch.weight.view(shape[0], 1, 1, *shape[3:]) / (shape[1] * shape[2])
            convolution.weight.copy_(plane.expand(shape))
            convolution.bias.copy_(self.patch.bias)

    def start_patch(self) -> None:
        """Draw the patch embedding so that white paper gives zero."""
        with torch.no_grad():
            self.patch.weight.normal_(0.0, 1.0 / 16.0)
            self.patch.bias.copy_(-self.patch.weight.sum(1))

    def _table(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Give position indices and weights, and the rotary cosine and sine, of a grid in visual tokens."""
        if grid not in self.tables:
            visual = self.model.model.visual
            sizes = torch.tensor([[1, 2 * grid[0], 2 * grid[1]]])
            indices, weights = get_vision_interpolation_indices_and_weights(
                sizes,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=2,
                kwargs={},
            )
            places = get_vision_position_ids(sizes, 2, kwargs={})
            cosine, sine = visual.rotary_pos_emb(visual.pos_embed.weight, places)
            self.tables[grid] = (indices, weights[:, :, None], cosine, sine)
        return self.tables[grid]

    def see(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run the vision tower on patches (B, N, 256): last hidden (B, N, 128), visual tokens (B, V, D), deepstack."""
        visual = self.model.model.visual
        indices, weights, cosine, sine = self._table(grid)
        batch, count, _ = patches.shape
        hidden = self.patch(patches) + (visual.pos_embed(indices) * weights).sum(1)
        deep: list[Tensor] = []
        for index, block in enumerate(visual.blocks):
            qkv = block.attn.qkv(block.norm1(hidden)).view(batch, count, 3, block.attn.num_heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = attend(rotate(query, cosine, sine), rotate(key, cosine, sine), value, causal=False)
            hidden = hidden + block.attn.proj(mixed.transpose(1, 2).reshape(batch, count, -1))
            hidden = hidden + block.mlp(block.norm2(hidden))
            if index in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(index)]
                deep.append(merger(hidden).view(batch, count // 4, -1))
        return hidden, visual.merger(hidden).view(batch, count // 4, -1), deep

    def forward(
        self,
        patches: Tensor,
        grid: tuple[int, int],
        ids: Tensor | None = None,
        positions: Tensor | None = None,
        answer: int = 0,
    ) -> Outputs:
        """Read a batch.

        `patches` (B * pictures, N, 256); `ids` (B, S) with the pictures at the same place in all rows; `positions` (3, S);
        `answer` is the index of the last prompt token. Without `ids` only the vision tower runs.
        """
        hidden, tokens, deep = self.see(patches, grid)
        patch_logits, block_logits = self.patch_head(self._heard(hidden)), self.block_head(self._heard(tokens))
        if ids is None or positions is None:
            return Outputs(None, patch_logits, block_logits, [], [])
        text = self.model.model.language_model
        columns = (ids[0] == self.model.config.image_token_id).nonzero().flatten()
        states = embedded = place_tokens(text.embed_tokens(ids), tokens, columns)
        turn = text.rotary_emb(states, positions[:, None])
        guides: list[Tensor] = []
        quarters: list[Tensor] = []
        for index, layer in enumerate(text.layers):
            query, key, value = self.split(layer, states, *turn)
            guides += [
                looking(query[:, head, answer:], key[:, head // 2], columns)
                for guide_layer, head, _ in GUIDES
                if guide_layer == index
            ]
            states = self.close(layer, states, attend(query, key, value, causal=True))
            for quarter_head, (quarter_layer, _) in zip(self.quarter_heads, QUARTERS, strict=True):
                if quarter_layer == index:
                    told = self._heard(states[:, answer:])
                    quarters.append(quarter_head(F.rms_norm(told, told.shape[-1:])))
            if index < len(deep):
                states = add_tokens(states, deep[index], columns)
        draft = self.look_ahead(embedded, states, turn, answer, columns) if self.drafting else None
        logits = self.model.lm_head(text.norm(states[:, answer:]))
        return Outputs(logits, patch_logits, block_logits, guides, quarters, draft)

    def _heard(self, states: Tensor) -> Tensor:
        """Give states to a throw-away head, without a way back while it settles."""
        return states.detach() if self.settling else states

    def look_ahead(
        self, embedded: Tensor, states: Tensor, turn: tuple[Tensor, Tensor], answer: int, columns: Tensor
    ) -> Draft:
        """Guess the token after the next from the decoder's input and its last states (B, S, D)."""
        raise NotImplementedError("this architecture has no multi-token prediction layer")

    def split(self, layer: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give a decoder layer's queries, keys, both rotated, and values (B, heads, S, head size)."""
        attention = layer.self_attn
        normed = layer.input_layernorm(states)
        shape = (*states.shape[:2], -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(normed).view(shape)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(normed).view(shape)).transpose(1, 2)
        value = attention.v_proj(normed).view(shape).transpose(1, 2)
        return rotate(query, cosine, sine), rotate(key, cosine, sine), value

    def close(self, layer: Any, states: Tensor, mixed: Tensor) -> Tensor:
        """Add what attention gave (B, heads, S, head size) and the MLP to the states (B, S, D)."""
        states = states + layer.self_attn.o_proj(mixed.transpose(1, 2).reshape(*states.shape[:2], -1))
        added: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
        return added


def looking(query: Tensor, key: Tensor, columns: Tensor) -> Tensor:
    """Give the log-probabilities (B, A, V) that the last A steps' queries (B, A, head size) of a head look at the `columns` of
    its keys (B, S, head size)."""
    scores = (query @ key.transpose(1, 2)).float() * key.shape[-1] ** -0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(key.shape[1] - query.shape[1] + 1)
    chances: Tensor = scores.masked_fill(future, float("-inf")).log_softmax(-1)[:, :, columns]
    return chances


def cut_patches(canvases: Tensor, side: int = 16) -> Tensor:
    """Cut grey canvases (B, H, W) uint8 into normalised patches (B, N, side * side) in merge-block-major order."""
    batch, height, width = canvases.shape
    scaled = canvases.float() * (2.0 / 255.0) - 1.0
    blocks = scaled.view(batch, height // (2 * side), 2, side, width // (2 * side), 2, side)
    return blocks.permute(0, 1, 4, 2, 5, 3, 6).reshape(batch, -1, side * side)
