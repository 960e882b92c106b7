"""Sizes that only the data tells, in a program that is made once they are known: its inputs have them.

A derivative of the backward takes tangents and kept values of such sizes, and computes others again. A number that the
program finds anew is a symbol of its own there, as in the forward; those that its inputs have are symbols with a value,
like any size of an input, so that one program serves the next call, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from aotautograd.errors import DoubleBackwardUnavailable
from aotautograd.inputs import sizes_of
from primtorch.frozen import record
from primtorch.layout import dense_like, is_dense
from primtorch.spec import Size, TensorSpec, spec_of
from primtorch.symbolic import ShapeEnv, depends_on_data, expected, expr_of
from primtorch.symbolic.expr import Atom, IntExpr, intern_symbol


@record
class GivenSizes:
    """Where a program's inputs tell sizes that its graph does not: (symbol, input, its dimension or None: itself)."""

    places: tuple[tuple[str, int, int | None], ...] = ()

    def of(self, values: Sequence[object]) -> dict[str, int]:
        """The values of the symbols in a call."""
        return {name: _size(values[place], dim) for name, place, dim in self.places}


def name_given_sizes(module: fx.GraphModule, values: Sequence[object]) -> GivenSizes:
    """Describes the placeholders whose sizes depend on data by symbols that have the values given, and says of what the
    program computes again that it has the same sizes."""
    inputs = list(enumerate(zip(module.graph.find_nodes(op="placeholder"), values, strict=True)))
    inputs = [(i, (node, value)) for i, (node, value) in inputs if _sizes_of_data(node)]
    known, places = _Known(), []
    for i, (node, value) in inputs:
        val = node.meta["val"]
        for dim, size in [(None, val)] if isinstance(val, torch.SymInt) else enumerate(val.shape):
            if depends_on_data(size) and not known.has(size):
                places.append((known.add(size, _size(value, dim), node, dim), i, dim))
    if places:
        _find_again(module.graph, known)
    for _, (node, value) in inputs:
        node.meta["val"] = known.described(node, value)
    return GivenSizes(tuple(places))


def _sizes_of_data(*nodes: fx.Node) -> set[str]:
    """The data's sizes in what the nodes give, as they are written."""
    sizes = (size for node in nodes for size in sizes_of(node.meta.get("val")))
    return {_written(size) for size in sizes if depends_on_data(size)}


def _written(size: Size) -> str:
    return str(_expr(size))


def _expr(size: Size) -> IntExpr:
    return _env(size).simplify(expr_of(size)) if isinstance(size, torch.SymInt) else expr_of(size)


def _find_again(graph: fx.Graph, known: _Known) -> None:
    """Behind each operator whose result has a size that no operand has: that it is the one that an input has."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, (torch.Tensor, TensorSpec, torch.SymInt)):
            continue
        source = node.args[0] if node.target is operator.getitem else node
        given = _sizes_of_data(*source.all_input_nodes)  # type: ignore[union-attr]
        dims = [(None, val)] if isinstance(val, torch.SymInt) else enumerate(val.shape)
        again = [(dim, _written(size)) for dim, size in dims if depends_on_data(size)]
        new = [(dim, size) for dim, size in again if size in known.places and size not in given]
        places = [(dim, *known.places[size], not size.isidentifier()) for dim, size in new]
        if not places:
            continue
        with graph.inserting_after(node):
            found = graph.call_function(found_again, (node, tuple(places)))
        found.meta.update(node.meta)
        node.replace_all_uses_with(found, lambda user, found=found: user is not found)  # type: ignore[misc]


def found_again(value: Any, places: Sequence[tuple[int | None, Any, int | None, bool]]) -> Any:
    """A value that has the sizes of others: (its dimension, the other, the other's dimension, whether it is computed
    from a number of the data); None: a number. What it is computed from is only known of a size that is a number."""
    for dim, other, other_dim, computed in places:
        size = value if dim is None else value.shape[dim]
        given = other if other_dim is None else other.shape[other_dim]
        expected(size == (int(given) if computed else given))
    return value


@dataclass(slots=True)
class _Known:
    """The symbols by what they stand for: each such size as it is written; and those for symbols alone."""

    sizes: dict[str, Size] = field(default_factory=dict)
    places: dict[str, tuple[fx.Node, int | None]] = field(default_factory=dict)  # where an input has it
    atoms: dict[Atom, IntExpr] = field(default_factory=dict)

    def has(self, size: torch.SymInt) -> bool:
        return _written(size) in self.sizes

    def add(self, size: torch.SymInt, value: int, node: fx.Node, dim: int | None) -> str:
        """A symbol for a size that an input has there; its name."""
        made = _env(size).symbol(value, f"a size of {node.name}", min=0)
        self.sizes[_written(size)], self.places[_written(size)] = made, (node, dim)
        if _written(size).isidentifier():
            self.atoms[intern_symbol(_written(size))] = expr_of(made)
        return str(expr_of(made))

    def size(self, size: Size) -> Size:
        """What a size is written as."""
        if not isinstance(size, torch.SymInt):
            return size
        found = self.sizes.get(_written(size))
        return found if found is not None else _env(size).size(_expr(size).substitute(self.atoms))

    def described(self, node: fx.Node, value: object) -> TensorSpec | Size:
        if isinstance(node.meta["val"], torch.SymInt):
            return self.size(node.meta["val"])
        assert isinstance(value, torch.Tensor)
        spec = spec_of(node.meta["val"])
        shape, strides, offset = tuple(map(self.size, spec.shape)), tuple(map(self.size, spec.strides)), spec.offset
        if any(map(depends_on_data, strides)):
            if not is_dense(tuple(value.shape), value.stride()):
                raise DoubleBackwardUnavailable(
                    f"a derivative of the backward reads {node.name}, whose strides only the data tells",
                    node.meta.get("stack", ()),
                )
            strides = dense_like(shape, value.stride())
        offset = value.storage_offset() if depends_on_data(self.size(offset)) else self.size(offset)
        return TensorSpec(shape, strides, spec.dtype, spec.device, offset)


def _env(size: torch.SymInt) -> ShapeEnv:
    env: ShapeEnv = size.node.env
    return env


def _size(value: object, dim: int | None) -> int:
    if isinstance(value, torch.Tensor) and dim is not None:
        return int(value.shape[dim])
    assert isinstance(value, int)
    return value
