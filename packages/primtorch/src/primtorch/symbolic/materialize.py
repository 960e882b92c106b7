"""Sizes and other numbers as FX nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, overload
from weakref import WeakKeyDictionary

import torch

from primtorch.symbolic.expr import Atom, IntExpr, Symbol
from primtorch.symbolic.float_expr import FloatExpr
from primtorch.symbolic.scalar_ops import SCALAR_OPS
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
_Operand: TypeAlias = "fx.Node | int | float"
_made: WeakKeyDictionary[fx.Graph, dict[tuple[object, ...], fx.Node]] = WeakKeyDictionary()


@overload
def materialize(graph: fx.Graph, size: int | torch.SymInt, symbol_nodes: Mapping[str, fx.Node]) -> fx.Node | int: ...
@overload
def materialize(graph: fx.Graph, size: torch.SymFloat, symbol_nodes: Mapping[str, fx.Node]) -> fx.Node | float: ...
def materialize(
    graph: fx.Graph, size: int | torch.SymInt | torch.SymFloat, symbol_nodes: Mapping[str, fx.Node]
) -> fx.Node | int | float:
    """The size (or float) as a number or a node of the graph; equal subexpressions share a node.

    Nodes are placed right after what they are computed from (placeholders first), so that they dominate every use.
    `meta["val"]` of a new node is its SymInt or SymFloat.

    Args:
        symbol_nodes: for each symbol's name, the node that gives its value. A derived symbol without a node is
            computed from what it is derived from.

    Raises:
        KeyError: a symbol has no node.
    """
    if isinstance(size, int):
        return size
    node = node_of(size)
    maker = _Materializer(graph, symbol_nodes, node.env)
    if isinstance(node.expr, FloatExpr):
        number: fx.Node | float = maker.operand(node.expr)
        return number
    made: fx.Node | int = maker.polynomial(node.env.simplify(node._int()))
    return made


class _Materializer:
    def __init__(self, graph: fx.Graph, symbol_nodes: Mapping[str, fx.Node], env: ShapeEnv) -> None:
        self.graph = graph
        self.symbol_nodes = symbol_nodes
        self.env = env
        self.cache = _made.setdefault(graph, {})

    def symbol(self, name: str) -> object:
        """A symbol's node; a derived one is computed where it has none."""
        definition = self.env.definitions.get(name)
        if name in self.symbol_nodes or definition is None:
            return self.symbol_nodes[name]
        record = SCALAR_OPS[definition.op]
        operands = [self.operand(arg) for arg in definition.args]
        return self.call(record.function, *operands, value=self.env.named(name))

    def operand(self, expr: IntExpr | FloatExpr) -> Any:
        if isinstance(expr, IntExpr):
            return self.polynomial(self.env.simplify(expr))
        return self.symbol(expr.text) if expr.value is None else expr.value

    def polynomial(self, expr: IntExpr) -> Any:
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

    def atom(self, atom: Atom) -> Any:
        if isinstance(atom, Symbol):
            return self.symbol(atom.key)
        return self.call(_ATOM_OPERATORS[atom.op], self.polynomial(atom.left), self.polynomial(atom.right))

    def call(self, fn: Callable[..., Any], *args: _Operand, value: object = None) -> Any:
        if value is None and all(isinstance(a, int) for a in args):
            return int(fn(*args))
        if all(isinstance(a, (int, float)) for a in args):  # of symbols that a guard has fixed since
            return fn(*args)
        key = (fn, *(repr(a) if isinstance(a, float) else a for a in args))
        found = self.cache.get(key)
        if found is not None and not found._erased:
            return found
        with self.graph.inserting_after(self._latest([a for a in args if not isinstance(a, (int, float))])):
            made = self.graph.call_function(fn, args)
        if value is None:
            value = fn(*(a if isinstance(a, (int, float)) else a.meta["val"] for a in args))
        made.meta["val"] = value
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
