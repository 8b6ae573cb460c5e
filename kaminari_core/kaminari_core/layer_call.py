"""How a step calls each of its repeated layers: eagerly, or through one compiled graph that all of them share.

torch's compiler finds the graph of a call by checking, at every call, everything that the traced code looked at: for a decoder
layer some hundred conditions on modules, parameters and globals, which takes longer than the norms and additions that it fuses.
So it is asked once per shape. What it compiled is a function of tensors alone, the call's arguments and the layer's own; every
further layer that is built alike is called with its own tensors, directly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from kaminari_core.cache_directory import keep_graphs

_SHAPE = attrgetter("shape")


def run_layer(layer: nn.Module, *arguments: Tensor) -> Tensor:
    """Call the layer's decode method eagerly."""
    out: Tensor = layer.decode(*arguments)  # type: ignore[operator]
    return out


@dataclass(frozen=True, slots=True)
class Graph:
    """A compiled function, and what each of its inputs is: the index of an argument, or the name of a tensor of the layer."""

    compiled: Callable[..., Sequence[Tensor]]
    inputs: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class BoundGraph:
    """A graph with the tensors of one layer; `places` are (input, argument) of the arguments that are still missing."""

    compiled: Callable[..., Sequence[Tensor]]
    tensors: list[Any]
    places: tuple[tuple[int, int], ...]


class CompiledLayer:
    """`run_layer`, compiled once per bucket with no graph break allowed; `compiles` counts what the compiler really did.

    A layer and its tensors are taken to stay what they were when it was first called.
    """

    def __init__(self, limit: int) -> None:
        self.compiles = 0
        self._graphs: dict[Hashable, Graph] = {}
        self._bound: dict[Hashable, BoundGraph] = {}
        self._made: list[tuple[torch.fx.GraphModule, list[Tensor], Callable[..., Any]]] = []
        keep_graphs()
        inductor = torch._dynamo.lookup_backend("inductor")

        def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            self.compiles += 1
            compiled: Callable[..., Any] = inductor(graph, inputs)
            self._made.append((graph, list(inputs), compiled))
            return compiled

        # Isolated: another engine in this process compiles the same code object under its own limit.
        compile: Callable[..., Callable[..., Tensor]] = torch.compile
        self._call = compile(
            run_layer, fullgraph=True, dynamic=False, backend=counted, recompile_limit=limit, isolate_recompiles=True
        )

    def __call__(self, layer: nn.Module, *arguments: Tensor) -> Tensor:
        """Run a layer on the arguments of its decode method."""
        bound = self._bound.get((layer, *map(_SHAPE, arguments)))
        if bound is None:
            return self._first_call(layer, arguments)
        inputs = bound.tensors.copy()
        for place, argument in bound.places:
            inputs[place] = arguments[argument]
        return bound.compiled(*inputs)[0]

    def _first_call(self, layer: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor:
        """Trace and compile, unless a layer that is built alike has been; from then on this layer is called directly."""
        shapes = tuple(map(_SHAPE, arguments))
        key = (structure(layer), shapes)
        out = self._call(layer, *arguments)
        for made in self._made:
            if (graph := named_inputs(*made, layer, arguments)) is not None:
                self._graphs[key] = graph
        self._made.clear()
        if key in self._graphs:
            self._bound[layer, *shapes] = bind(self._graphs[key], layer)
        return out


def named_inputs(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Tensor],
    compiled: Callable[..., Any],
    layer: nn.Module,
    arguments: Sequence[Tensor],
) -> Graph | None:
    """What the inputs of a graph are in the call that it was traced from; None when there are others than the call's tensors,
    or not one result.
    """
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    if len(output.args[0]) != 1:
        return None
    known: dict[int, int | str] = {id(tensor): name for name, tensor in _tensors(layer).items()}
    known |= {id(argument): index for index, argument in enumerate(arguments)}
    found = [known.get(id(tensor)) for tensor in inputs]
    names = tuple(name for name in found if name is not None)
    return Graph(compiled, names) if len(names) == len(found) else None


def bind(graph: Graph, layer: nn.Module) -> BoundGraph:
    """The graph for a layer of the structure that it was traced from."""
    own = _tensors(layer)
    tensors = [own[name] if isinstance(name, str) else None for name in graph.inputs]
    places = tuple((place, name) for place, name in enumerate(graph.inputs) if isinstance(name, int))
    return BoundGraph(graph.compiled, tensors, places)


def structure(layer: nn.Module) -> Hashable:
    """Everything in a layer that its traced code can depend on, but for the values of its tensors.

    Two layers of equal structure may share a graph. What cannot be compared by value is compared by identity.
    """
    modules = []
    for name, module in layer.named_modules():
        plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        facts = tuple(
            (key, value if isinstance(value, Hashable) else id(value)) for key, value in sorted(plain.items())
        )
        modules.append((name, type(module), facts))
    tensors = [(name, tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in _tensors(layer).items()]
    return tuple(modules), tuple(tensors)


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(layer.named_parameters(remove_duplicate=False)),
        **dict(layer.named_buffers(remove_duplicate=False)),
    }
