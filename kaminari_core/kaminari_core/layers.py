"""The decoder parts that every model family here shares: norm, attention over the slot cache, gated MLP, and the loop of layers.

A model package brings what differs: its block (which norms stand where), its rotation and section layout, its names. The
contract between them is `Block`; `Decoder` drives it.

Letters in shapes: R rows, W new tokens of a row, S prompt positions, H hidden size, Q query heads, K kv heads, D head size,
T cache positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaminari_core.flow import Embedded
from kaminari_core.kernels import operators
from kaminari_core.protocols import Cache, LayerCall, Model, Step
from kaminari_core.rope import Rotation, rotary_angles, scalar_table


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467), rounded as the reference models do: scaled in float32, cast, then weighted."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x; shape and dtype are kept."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up in one product: the first half of its rows is the gate (arXiv:2002.05202)."""

    quantizable: ClassVar[tuple[str, ...]] = ("gate_up_proj", "down_proj")

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) to (..., H)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        down: Tensor = self.down_proj(F.silu(gate) * up)
        return down


class PatchEmbedding(nn.Module):
    """The patch embedding of a vision tower as a matrix product, with the parameters of the Conv3d that it replaces.

    A Conv3d whose stride equals its kernel is a matrix product, which some libraries run very slowly in bfloat16.
    """

    def __init__(self, channels: int, frames: int, patch_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, channels, frames, patch_size, patch_size))
        self.bias = nn.Parameter(torch.empty(hidden))

    @classmethod
    def of(cls, convolution: nn.Conv3d) -> PatchEmbedding:
        """The same embedding as a convolution whose stride equals its kernel, sharing its parameters."""
        hidden, channels, frames, patch_size, _ = convolution.weight.shape
        with torch.device("meta"):
            embedding = cls(channels, frames, patch_size, hidden)
        assert convolution.bias is not None, "a patch embedding has a bias"
        embedding.weight = nn.Parameter(convolution.weight, requires_grad=False)
        embedding.bias = nn.Parameter(convolution.bias, requires_grad=False)
        return embedding

    def forward(self, patches: Tensor) -> Tensor:
        """(patches, channels * frames * height * width) to (patches, hidden), in the dtype of the weights."""
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


def attention_mask(step: Step, group: int) -> Tensor:
    """The boolean mask (R, 1, G * W, length) that lets each query of a decode step see the keys up to its own cursor.

    The G query heads of one kv head are laid out as G * W query rows of it: the same numbers as repeating the keys, and several
    times faster on a CPU than grouped-query flags.
    """
    seen = torch.arange(step.length, device=step.cursors.device) <= step.cursors[:, :, None]
    return seen[:, None].repeat(1, 1, group, 1)


class Attention(nn.Module):
    """Grouped-query attention over one layer of the slot cache, with fused q, k, v and optional norms on queries and keys.

    `kernel` says that decode runs through the kernel of `kaminari_core.kernels`, which reads each row as far as that is filled
    and looks at no mask; see `kernels.adoption`.
    """

    quantizable: ClassVar[tuple[str, ...]] = ("qkv_proj", "o_proj")

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotation: Rotation,
        *,
        norm_eps: float | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotation = rotation
        self.kernel = False
        self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.Identity() if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm = nn.Identity() if norm_eps is None else RMSNorm(head_dim, norm_eps)

    def _project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (..., H), tables (..., 1, D) to rotated q (..., Q, D), rotated k (..., K, D) and v (..., K, D)."""
        joined = self.qkv_proj(hidden).view(*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = joined.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        return self.rotation(self.q_norm(q), cos, sin), self.rotation(self.k_norm(k), cos, sin), v

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Run prompt positions [start, start + S) of one slot.

        hidden (S, H); cos, sin (S, D); keys, values (K, T, D) are the slot's row of this layer, written at those positions.
        """
        q, k, v = self.store(hidden, cos, sin, keys, values, start)
        stop = start + hidden.shape[0]
        if start == 0:
            # The fresh tensors, not the cache views: contiguous, and the same call that the reference makes.
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=True,
                enable_gqa=True,
            )
            attended = out[0].transpose(0, 1).flatten(1)
        else:
            # With a mask, grouped-query flags keep CUDA from the paths that hold no scores.
            reach = torch.arange(start, stop, device=hidden.device)
            mask = torch.arange(stop, device=hidden.device) <= reach[:, None]
            mask = mask.repeat(self.heads // self.kv_heads, 1)[None, None]
            attended = masked_attention(q[None], keys[None], values[None], mask)[0]
        projected: Tensor = self.o_proj(attended)
        return projected

    def store(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the keys and values that `prefill` would, without attending; returns q (S, Q, D), k and v (S, K, D)."""
        q, k, v = self._project(hidden, cos[:, None], sin[:, None])
        stop = start + hidden.shape[0]
        keys[:, start:stop] = k.transpose(0, 1)
        values[:, start:stop] = v.transpose(0, 1)
        return q, k, v

    def decode(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, cursors: Tensor, mask: Tensor
    ) -> Tensor:
        """Run one step of R rows, which are the first R slots of the layer's keys and values (slots, K, T, D).

        hidden (R, W, H); cos, sin (R, W, 1, D); cursors (R, W); mask as `attention_mask` makes it, not looked at by the kernel.
        """
        q, k, v = self._project(hidden, cos, sin)
        row = torch.arange(cursors.shape[0], device=hidden.device)[:, None]
        keys[row, :, cursors] = k
        values[row, :, cursors] = v
        if self.kernel:
            attended = operators.decode_attention(q, keys, values, cursors)
        else:
            attended = masked_attention(q, keys, values, mask)
        projected: Tensor = self.o_proj(attended)
        return projected


def masked_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """As `operators.decode_attention`, by torch, over the positions that a mask of `attention_mask` has."""
    rows, width, _, head_dim = query.shape
    kv_heads, length = keys.shape[1], mask.shape[-1]
    # (R, W, K, G, D) -> (R, K, G * W, D), the layout of the mask.
    grouped = query.reshape(rows, width, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(grouped, keys[:rows, :, :length], values[:rows, :, :length], mask)
    return out.view(rows, kv_heads, -1, width, head_dim).permute(0, 3, 1, 2, 4).flatten(2)


def attends_by_cursors(model: Model) -> bool:
    """Whether all attention of a model's decode steps reads each row as far as its cursor, so that no length has to bound it.

    That is known of models whose `network` attends through `Attention` with its kernel alone.
    """
    network = getattr(model, "network", None)
    if not isinstance(network, nn.Module):
        return False
    found = [module for module in network.modules() if isinstance(module, Attention)]
    return bool(found) and all(attention.kernel for attention in found)


class Block(Protocol):
    """One decoder layer of a model package."""

    def prefill(self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """As Attention.prefill, for the whole layer with its residuals."""
        ...

    def decode(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, cursors: Tensor, mask: Tensor
    ) -> Tensor:
        """As Attention.decode, for the whole layer with its residuals."""
        ...


class Decoder(nn.Module):
    """Embedding, blocks, final norm and head of one text decoder over the slot cache.

    `frequencies` (D / 2) is float32; `axes` names the position axis of each frequency; `table` turns angles into cos and sin for
    the blocks' rotation. `set_rotary` must be called once the device and the longest position are known.
    """

    quantizable_heads: ClassVar[tuple[str, ...]] = ("lm_head",)

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        vocabulary: int,
        hidden: int,
        norm_eps: float,
        axes: Sequence[int],
        table: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]],
        group: int,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(hidden, norm_eps)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self._axes, self._table, self.group = tuple(axes), table, group
        self._frequencies: Tensor | None = None
        self._scalar: tuple[Tensor, Tensor] | None = None

    def set_rotary(self, frequencies: Tensor, positions: int, dtype: torch.dtype) -> None:
        """Keep the frequencies and build the decode table for positions 0 .. positions - 1. Plain tensors, in no checkpoint."""
        self._frequencies = frequencies
        self._scalar = scalar_table(positions, frequencies, self._table, dtype)

    def hidden_states(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> Tensor:
        """Run prompt positions [start, stop) of one slot; returns their hidden states (S, H) behind the final norm."""
        hidden = embedded.hidden[start:stop]
        cos, sin = self.prompt_tables(embedded.positions[:, start:stop], hidden.dtype)
        for index, layer in enumerate(self.layers):
            block = cast(Block, layer)
            hidden = block.prefill(hidden, cos, sin, cache.keys[index, slot], cache.values[index, slot], start)
            if index in embedded.after_layer:
                hidden = hidden + embedded.after_layer[index][start:stop]
        normed: Tensor = self.norm(hidden)
        return normed

    def prefill(self, embedded: Embedded, start: int, stop: int, cache: Cache, slot: int) -> Tensor:
        """Run prompt positions [start, stop) of one slot; returns what `next_token` does."""
        hidden = self.hidden_states(embedded, start, stop, cache, slot)
        return self.next_token(hidden, cache, slot, ends=stop == len(embedded.hidden))

    def next_token(self, hidden: Tensor, cache: Cache, slot: int, *, ends: bool = True) -> Tensor:
        """The logits (V,) behind the last of some hidden states (S, H), which a draft head is left in `cache.state`.

        Where that does not end the prompt nobody reads them, and the head is large: then there are none, (0,).
        """
        if cache.state is not None:
            cache.state[slot, 0] = hidden[-1]
        if not ends:
            return hidden.new_empty(0)
        logits: Tensor = self.lm_head(hidden[-1:])
        return logits[0]

    def decode(self, step: Step, cache: Cache, layer_call: LayerCall) -> Tensor:
        """Run one step for all rows; returns the logits (R, W, V)."""
        cos, sin = self.step_tables(step)
        mask = attention_mask(step, self.group)
        hidden = self.embed_tokens(step.tokens)
        for index, layer in enumerate(self.layers):
            hidden = layer_call(layer, hidden, cos, sin, cache.keys[index], cache.values[index], step.cursors, mask)
        hidden = self.norm(hidden)
        if cache.state is not None:
            rows, width = step.tokens.shape
            cache.state[:rows, :width] = hidden
        logits: Tensor = self.lm_head(hidden)
        return logits

    def prompt_tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (S, D) of prompt positions, int64 (axes, S)."""
        assert self._frequencies is not None, "set_rotary was not called"
        return self._table(rotary_angles(positions, self._frequencies, self._axes), dtype)

    def step_tables(self, step: Step) -> tuple[Tensor, Tensor]:
        """cos and sin (R, W, 1, D) of a decode step."""
        assert self._scalar is not None, "set_rotary was not called"
        cos, sin = self._scalar
        return cos[step.positions][:, :, None], sin[step.positions][:, :, None]
