"""What is GLM-OCR's own in the batched training forward: the tower's blocks, the decoder's layers, the draft head.

RMSNorm and the rotations are compiled for training, each into one pass over the states: eagerly they took a third of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GlmOcrForConditionalGeneration
from transformers.vision_utils import get_vision_position_ids

from training.forward import Draft, Reader, attend, looking, rotate
from training.glmocr.architecture import EPSILON, build_draft
from training.glmocr.prompt import GLMOCR


def _norm(states: Tensor, weight: Tensor) -> Tensor:
    states = states.float()
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + EPSILON) * weight


def _add_normed(states: Tensor, added: Tensor, weight: Tensor) -> Tensor:
    return states + _norm(added, weight)


def _norm_rotate(states: Tensor, weight: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return rotate(_norm(states, weight), cosine, sine)


def _rotate_pairs(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    pairs = states.float().view(*states.shape[:-1], -1, 2)
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1)
    return states * cosine + turned.flatten(-2) * sine


def _trained(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function for where gradients are taken; elsewhere shapes are too many for it to pay."""
    compiled = torch.compile(function, dynamic=True)

    def call(*tensors: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return function(*tensors)
        with torch.autocast("cpu", enabled=False):
            result: Tensor = compiled(*tensors)
        return result

    return call


_compiled_norm, _compiled_add_normed = _trained(_norm), _trained(_add_normed)
norm_rotate, rotate_pairs = _trained(_norm_rotate), _trained(_rotate_pairs)


def norm(states: Tensor, weight: Tensor) -> Tensor:
    """Give the RMSNorm of states (..., D)."""
    # In rows: one compiled function then serves every batch and length.
    return _compiled_norm(states.reshape(-1, states.shape[-1]), weight).view(states.shape)


def add_normed(states: Tensor, added: Tensor, weight: Tensor) -> Tensor:
    """Add the RMSNorm of what a layer gave (..., D) to the states (..., D)."""
    rows = (-1, states.shape[-1])
    return _compiled_add_normed(states.reshape(rows), added.reshape(rows), weight).view(states.shape)


class GlmReader(Reader):
    """GLM-OCR with its draft head and the throw-away heads that training adds."""

    form = GLMOCR

    def __init__(self, model: GlmOcrForConditionalGeneration) -> None:
        super().__init__(model)
        visual = model.model.visual
        # The convolution that joins four patches to a visual token, as a matrix.
        self.merger_joint = nn.Linear(4 * visual.config.hidden_size, visual.config.out_hidden_size)
        with torch.no_grad():
            self.merger_joint.weight.copy_(visual.downsample.weight.permute(0, 2, 3, 1).flatten(1))
            self.merger_joint.bias.copy_(visual.downsample.bias)
        self.draft = build_draft(model)
        self.turns: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def fold_out(self) -> None:
        """Write the folded patch embedding and the joining matrix back to the library's convolutions."""
        super().fold_out()
        downsample = self.model.model.visual.downsample
        with torch.no_grad():
            joint = self.merger_joint.weight.view(len(downsample.weight), 2, 2, -1)
            downsample.weight.copy_(joint.permute(0, 3, 1, 2))
            downsample.bias.copy_(self.merger_joint.bias)

    def _turn(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Give the tower's rotary cosine and sine (N, head size) of a grid in visual tokens."""
        if grid not in self.turns:
            places = get_vision_position_ids(torch.tensor([[1, 2 * grid[0], 2 * grid[1]]]), 2, kwargs={})
            self.turns[grid] = self.model.model.visual.rotary_pos_emb(places, places)
        return self.turns[grid]

    def see(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run the vision tower on patches (B, N, 196): last hidden (B, N, 128), visual tokens (B, V, D), no deepstack."""
        visual = self.model.model.visual
        turn = self._turn(grid)
        batch, count, _ = patches.shape
        hidden = self.patch(patches).float()
        for block in visual.blocks:
            attention = block.attn
            qkv = attention.qkv(norm(hidden, block.norm1.weight)).view(batch, count, 3, attention.num_heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            query = norm_rotate(query, attention.q_norm.weight, *turn)
            key = norm_rotate(key, attention.k_norm.weight, *turn)
            mixed = attend(query, key, value, causal=False)
            hidden = hidden + attention.proj(mixed.transpose(1, 2).reshape(batch, count, -1))
            hidden = hidden + block.mlp(norm(hidden, block.norm2.weight))
        hidden = norm(hidden, visual.post_layernorm.weight)
        return hidden, visual.merger(self.merger_joint(hidden.view(batch, count // 4, -1))), []

    def split(self, layer: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give a decoder layer's queries, keys, both rotated, and values (B, heads, S, head size)."""
        attention = layer.self_attn
        normed = norm(states, layer.input_layernorm.weight)
        shape = (*states.shape[:2], -1, attention.head_dim)
        query = attention.q_proj(normed).view(shape).transpose(1, 2)
        key = attention.k_proj(normed).view(shape).transpose(1, 2)
        value = attention.v_proj(normed).view(shape).transpose(1, 2)
        return rotate_pairs(query, cosine, sine), rotate_pairs(key, cosine, sine), value

    def close(self, layer: Any, states: Tensor, mixed: Tensor) -> Tensor:
        """Add what attention gave (B, heads, S, head size) and the MLP to the states (B, S, D)."""
        attended = layer.self_attn.o_proj(mixed.transpose(1, 2).reshape(*states.shape[:2], -1))
        states = add_normed(states, attended, layer.post_self_attn_layernorm.weight)
        inner = layer.mlp(norm(states, layer.post_attention_layernorm.weight))
        return add_normed(states, inner, layer.post_mlp_layernorm.weight)

    def look_ahead(
        self, embedded: Tensor, states: Tensor, turn: tuple[Tensor, Tensor], answer: int, columns: Tensor
    ) -> Draft:
        """Guess the token after the next from the decoder's input and its last states (B, S, D).

        The decoder is not trained by it: what it reads and the output head are taken as they are.
        """
        draft, text = self.draft, self.model.model.language_model
        with torch.no_grad():
            hidden, following = norm(states[:, :-1], text.norm.weight), embedded[:, 1:].detach()
        joined = torch.cat((draft.enorm(following), draft.hnorm(hidden)), dim=-1)
        joined = draft.eh_proj(joined).float()
        query, key, value = self.split(draft.block, joined, *(part[:, :-1].contiguous() for part in turn))
        looked = looking(query[:, 0, answer:], key[:, 0], columns)
        guessed = self.close(draft.block, joined, attend(query, key, value, causal=True))
        guessed = norm(guessed[:, answer:], draft.norm.weight)
        return Draft(F.linear(guessed, self.model.lm_head.weight.detach()), looked)
