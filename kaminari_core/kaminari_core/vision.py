"""Blocks of a vision tower over one picture: dense attention, which is one graph for all blocks where it is compiled.

The stock blocks serve several pictures of any sizes in one call, by lists of lengths that have to be read on the host in every
block. An engine embeds one picture at a time, where every patch sees every patch and nothing has to be cut.

Letters in shapes: N patches, H heads, D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kaminari_core.cache_directory import keep_graphs
from kaminari_core.flow import Patches

BlockCall = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""Called as `call(block, hidden, cos, sin)`; runs `block.compute(hidden, cos, sin)`."""


def run_block(block: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Call a block's computation eagerly."""
    out: Tensor = block.compute(hidden, cos, sin)  # type: ignore[operator]
    return out


class VisionBlock(nn.Module):
    """A pre-norm block with the parameters of a stock one, under the same names; called as the stock tower calls its blocks."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = stock.norm1, stock.norm2, stock.mlp
        self.attn = DenseAttention(stock.attn)
        self.call: BlockCall = run_block

    def forward(self, hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_lengths: Any) -> Tensor:
        """hidden (N, width) and the tables cos, sin (N, D) of the one picture that it is; lengths are not needed."""
        cos, sin = position_embeddings
        return self.call(self, hidden, cos, sin)

    def compute(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm, attention, add; norm, MLP, add."""
        hidden = hidden + self.attn(self.norm1(hidden), cos, sin)
        out: Tensor = hidden + self.mlp(self.norm2(hidden))
        return out


class DenseAttention(nn.Module):
    """Attention of all patches to all patches, with the parameters of a stock attention and its norms where it has any."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = stock.qkv, stock.proj, stock.num_heads
        self.q_norm = getattr(stock, "q_norm", nn.Identity())
        self.k_norm = getattr(stock, "k_norm", nn.Identity())

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden (N, width), cos and sin (N, D) to (N, width)."""
        q, k, v = self.qkv(hidden).view(hidden.shape[0], 3, self.heads, -1).unbind(1)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.proj(out[0].transpose(0, 1).flatten(1))
        return projected


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding (arXiv:2104.09864) of x (N, H, D) by tables (N, D), in float32 as the stock towers do."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos[:, None].float() + turned * sin[:, None].float()).to(x.dtype)


class StockTower(nn.Module):
    """A stock vision tower with dense blocks, of which parts may be compiled. Model packages build the tower and call it."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        tower.blocks = nn.ModuleList([VisionBlock(block) for block in tower.blocks])
        self.tower = tower

    def parts(self) -> dict[str, list[nn.Module]]:
        """What the tower is made of, by name: modules of one kind, which one graph can serve."""
        found = {
            "patch embedding": [self.tower.patch_embed],
            "blocks": list(self.tower.blocks),
            "merger": [self.tower.merger],
        }
        if deepstack := list(getattr(self.tower, "deepstack_merger_list", ())):
            found["deepstack mergers"] = deepstack
        return found

    def compile_part(self, name: str) -> None:
        """Let one graph, made on first use, serve a part for every number of patches."""
        for module, call in compiled_calls(self.parts()[name]).items():
            if isinstance(module, VisionBlock):
                module.call = call
            else:
                module.forward = functools.partial(call, module)

    def picture(self, tokens: int) -> Patches:
        """A square picture of noise of about so many visual tokens, to measure and to warm up with."""
        merged = self.tower.spatial_merge_size
        side = merged * max(1, math.isqrt(tokens))
        weight = self.tower.patch_embed.weight
        generator = torch.Generator().manual_seed(0)
        return Patches(torch.randn(side * side, math.prod(weight.shape[1:]), generator=generator), (1, side, side))


def run_module(module: nn.Module, x: Tensor) -> Tensor:
    """Call a stock module's own forward, whatever now stands in its place."""
    out: Tensor = type(module).forward(module, x)
    return out


def compiled_calls(modules: list[nn.Module]) -> dict[nn.Module, Callable[..., Tensor]]:
    """One compiled function for modules of one kind, called as `call(module, *arguments)`, and for each module that function."""
    keep_graphs()
    run: Callable[..., Tensor] = run_block if isinstance(modules[0], VisionBlock) else run_module
    compile: Callable[..., Callable[..., Tensor]] = torch.compile
    return dict.fromkeys(modules, compile(run, fullgraph=True, dynamic=True))
