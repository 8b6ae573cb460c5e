"""Which weights of a model are converted: the linear layers of the language model's attention and MLPs, and its head on request.

The seam: a module says itself which of its linear layers may be converted, by names in `quantizable` or `quantizable_heads`; the
parts in `kaminari_core.layers` do, so a model that is built of them needs nothing. Everything that no module names stays:
vision towers, embeddings, norms, routers and experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from kaminari_core.weights import Source, sources


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer (N, K) to convert: its name in the network, and the checkpoint's tensors that are its weight."""

    layer: str
    rows: int
    columns: int
    head: bool
    sources: tuple[Source, ...]


def networks(model: object) -> dict[str, nn.Module]:
    """The torch modules that a loaded model keeps, by attribute."""
    return {name: value for name, value in vars(model).items() if isinstance(value, nn.Module)}


def targets(model: object, *, heads: bool) -> list[Target]:
    """The layers of a model, loaded by `weights.load_weights`, that may be converted; with `heads`, also the language model's.

    A layer whose tensors stand transposed in the checkpoint, or that has none of its own, is left out.
    """
    found = []
    for network in networks(model).values():
        filled = sources(network)
        for name, linear, head in _linears(network):
            tensors = filled.get(f"{name}.weight", ())
            if (heads or not head) and tensors and not any(tensor.transposed for tensor in tensors):
                found.append(Target(name, linear.out_features, linear.in_features, head, tensors))
    return found


def linear_layers(model: object) -> Mapping[str, nn.Linear]:
    """The layers that `targets` chooses from, by name, whether or not the checkpoint's tensors are known."""
    return {name: linear for network in networks(model).values() for name, linear, _ in _linears(network)}


def _linears(network: nn.Module) -> Iterator[tuple[str, nn.Linear, bool]]:
    for path, module in network.named_modules():
        for attribute, head in (("quantizable", False), ("quantizable_heads", True)):
            for name in getattr(module, attribute, ()):
                linear = getattr(module, name)
                if isinstance(linear, nn.Linear):
                    yield f"{path}.{name}".removeprefix("."), linear, head
