"""Derivatives that a program takes by what it has computed itself.

Autograd sees one node for a compiled graph: between two of its results it knows no derivative. So where the program
asks for one, capture begins anew and ends the graph behind the value by which it is taken: an input of the next graph.
"""

from __future__ import annotations

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


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    """The tensors that a program gives as `inputs` of the engine's functions."""
    given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return [t for t in given if isinstance(t, torch.Tensor)]
