"""Derivatives that a program takes by what it has computed itself.

Autograd sees one node for a compiled graph: between two of its results it knows no derivative. So where the program
asks for one, capture begins anew and ends the graph behind the value by which it is taken: an input of the next graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchdynamo.interpreter.protocol import Escape

CALL = "call"  # meta of a node: how many calls were recorded before it


class CutGraph(Escape):
    """The graph has to end before its call number `call`."""

    def __init__(self, call: int) -> None:
        super().__init__(call)
        self.call = call


def cut_for(nodes: list[fx.Node | None]) -> None:
    """Raises `CutGraph` where derivatives are taken by the values of `nodes`, and some are no inputs of the graph."""
    made = [node for node in nodes if node is not None and node.op != "placeholder"]
    calls = [_call_of(node) for node in made]
    known = [call for call in calls if call is not None]
    if known:
        raise CutGraph(min(known) + 1)


def _call_of(node: fx.Node) -> int | None:
    while CALL not in node.meta and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]  # one of several results
    call: int | None = node.meta.get(CALL)
    return call


def tensors_of(inputs: object) -> list[torch.Tensor]:
    """The tensors that a program gives as `inputs` of the engine's functions."""
    given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return [t for t in given if isinstance(t, torch.Tensor)]


# -- histories of fakes ----------------------------------------------------------------------

OUTSIDE = "_ComputedBackward"  # the name of the node that stands for the history of an input that is no leaf


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node of the tensors' history as far as the graph knows it, once. Tensors of inference mode have none."""
    recorded = [t for t in tensors if t.requires_grad and not t.is_inference()]
    with torch._C.DisableTorchFunction(), torch.inference_mode(False):
        work = [torch.autograd.graph.get_gradient_edge(t).node for t in recorded]
    seen: set[object] = set()
    while work:
        node = work.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if node.name() != OUTSIDE:
                work.extend([source for source, _ in node.next_functions])


def accumulates(node: torch.autograd.graph.Node) -> bool:
    """Whether a node is the end of a history: that of a leaf."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def first_leaf_behind(tensors: Iterable[object], leaves: Sequence[torch.Tensor]) -> int:
    """The place of the first of these leaves that somebody could ask for who has the tensors, or -1: one of them is the
    leaf, or has no history but the leaf's, so that it would have none without it."""
    values = [value for value in tensors if isinstance(value, torch.Tensor) and value.requires_grad]
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    found = [places[id(value)] for value in values if id(value) in places]
    for value in values:
        ends = list(nodes_behind([value]))
        own = [places[id(node.variable)] for node in ends if accumulates(node) and id(node.variable) in places]
        if own and not any(
            node.name() == OUTSIDE or (accumulates(node) and id(node.variable) not in places) for node in ends
        ):
            found += own
    return min(found, default=-1)
