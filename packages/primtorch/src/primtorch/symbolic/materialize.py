"""Sizes as FX nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from primtorch.symbolic.expr import Atom, IntExpr, Symbol
from primtorch.symbolic.shape_env import ShapeEnv
from primtorch.symbolic.sym_node import node_of

if TYPE_CHECKING:  # `import torch` alone does not load torch.fx, which takes longer than this whole package
    from torch import fx

_ATOM_OPERATORS: dict[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "min": torch.sym_min,
    "max": torch.sym_max,
}
_Operand: TypeAlias = "fx.Node | int"
_made: WeakKeyDictionary[fx.Graph, dict[tuple[object, ...], fx.Node]] = WeakKeyDictionary()


def materialize(graph: fx.Graph, size: int | torch.SymInt, symbol_nodes: Mapping[str, fx.Node]) -> fx.Node | int:
    """The size as an int or a node of the graph; equal subexpressions share a node.

    Nodes are placed right after what they are computed from (placeholders first), so that they dominate every use.
    `meta["val"]` of a new node is its SymInt.

    Args:
        symbol_nodes: for each symbol's name, the node that gives its value.

    Raises:
        KeyError: a symbol has no node.
    """
    if isinstance(size, int):
        return size
    node = node_of(size)
    return _Materializer(graph, symbol_nodes, node.env).polynomial(node.env.simplify(node._int()))


class _Materializer:
    def __init__(self, graph: fx.Graph, symbol_nodes: Mapping[str, fx.Node], env: ShapeEnv) -> None:
        self.graph = graph
        self.symbol_nodes = symbol_nodes
        self.env = env
        self.cache = _made.setdefault(graph, {})

    def polynomial(self, expr: IntExpr) -> _Operand:
        value = expr.as_int()
        if value is not None:
            return value
        total: _Operand | None = None
        for monomial, coefficient in expr.ordered_terms():
            term: _Operand | None = None
            for atom in monomial:
                factor = self.atom(atom)
                term = factor if term is None else self.call(operator.mul, term, factor)
            size = abs(coefficient)
            if term is None:
                term = size
            elif size != 1:
                term = self.call(operator.mul, term, size)
            if total is None:
                total = term if coefficient > 0 else self.call(operator.neg, term)
            else:
                total = self.call(operator.add if coefficient > 0 else operator.sub, total, term)
        assert total is not None
        return total

    def atom(self, atom: Atom) -> _Operand:
        if isinstance(atom, Symbol):
            return self.symbol_nodes[atom.key]
        return self.call(_ATOM_OPERATORS[atom.op], self.polynomial(atom.left), self.polynomial(atom.right))

    def call(self, fn: Callable[..., Any], *args: _Operand) -> _Operand:
        if all(isinstance(a, int) for a in args):
            return int(fn(*args))
        key = (fn, *args)
        found = self.cache.get(key)
        if found is not None and not found._erased:
            return found
        with self.graph.inserting_after(self._latest([a for a in args if not isinstance(a, int)])):
            made = self.graph.call_function(fn, args)
        made.meta["val"] = fn(*(a if isinstance(a, int) else a.meta["val"] for a in args))
        made.meta["stack"] = ()
        self.cache[key] = made
        return made

    def _latest(self, operands: list[fx.Node]) -> fx.Node:
        latest = operands[0]
        for node in operands[1:]:
            latest = max(latest, node)
        if latest.op == "placeholder":
            following = latest.next
            while following.op == "placeholder":
                latest, following = following, following.next
        return latest
