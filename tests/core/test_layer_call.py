"""The compiled call of a layer: who shares a graph, and who must not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kaminari_core.layer_call import CompiledLayer, run_layer, structure
from kaminari_core.testing import TinyBlock


class Scaled(nn.Module):
    """A layer whose arithmetic depends on a plain attribute, and which writes to one of its arguments."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def decode(self, x: Tensor, written: Tensor) -> Tensor:
        out = (x @ self.weight) * self.factor
        written += out
        return out + written


def test_layers_share_a_graph_only_where_they_are_built_alike() -> None:
    layers = [Scaled(1.0), Scaled(1.0), Scaled(3.0), Scaled(1.0), Scaled(3.0)]
    call = CompiledLayer(limit=4)
    with torch.inference_mode():
        for rows in (2, 5):
            for layer in (*layers, *layers):
                x, written = torch.randn(rows, 8), torch.randn(rows, 8)
                other = written.clone()
                torch.testing.assert_close(call(layer, x, written), run_layer(layer, x, other))
                torch.testing.assert_close(written, other)
    # Two kinds of layers at two shapes.
    assert call.compiles == 4


def test_structure_is_everything_but_values() -> None:
    one, other = TinyBlock(), TinyBlock()
    assert structure(one) == structure(other)
    other.attention.kernel = True
    assert structure(one) != structure(other)
    other = TinyBlock()
    other.mlp_norm.eps *= 2
    assert structure(one) != structure(other)
    assert structure(one) != structure(TinyBlock().to(torch.bfloat16))
