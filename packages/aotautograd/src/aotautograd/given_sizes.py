"""Sizes that only the data tells, in a program that is made once they are known: its inputs have them.

A derivative of the backward takes tangents and kept values of such sizes, and computes others again. A number that the
program finds anew is a symbol of its own there, as in the forward; those that its inputs have are symbols with a value,
like any size of an input, so that one program serves the next call, too.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from aotautograd.errors import DoubleBackwardUnavailable
from aotautograd.inputs import sizes_of
from primtorch.frozen import record
from primtorch.layout import dense_like, is_dense
from primtorch.spec import Size, TensorSpec, spec_of
from primtorch.symbolic import ShapeEnv, depends_on_data, expected, expr_of, materialize
from primtorch.symbolic.expr import Atom, IntExpr, intern_symbol
from primtorch.symbolic.sym_node import node_of

aten = torch.ops.aten


@record
class GivenSizes:
    """Where a program's inputs tell sizes that its graph does not: (symbol, input, its dimension or None: itself)."""

    places: tuple[tuple[str, int, int | None], ...] = ()

    def of(self, values: Sequence[object]) -> dict[str, int]:
        """The values of the symbols in a call."""
        return {name: _size(values[place], dim) for name, place, dim in self.places}


def name_given_sizes(module: fx.GraphModule, values: Sequence[object], found: Mapping[Atom, IntExpr]) -> GivenSizes:
    """Describes the placeholders whose sizes depend on data by symbols that have the values given, and says of what the
    program computes again that it has the same sizes.

    Args:
        found: what the trace that the program is made of came to know of the data's numbers.
    """
    known, places = _Known(module.graph, found), []
    inputs = list(enumerate(zip(module.graph.find_nodes(op="placeholder"), values, strict=True)))
    inputs = [(i, (node, value)) for i, (node, value) in inputs if _sizes_of_data(node)]
    for i, (node, value) in inputs:
        val = node.meta["val"]
        for dim, size in [(None, val)] if isinstance(val, torch.SymInt) else enumerate(val.shape):
            if _of_data(size) and depends_on_data(known.size(size)) and not known.has(size):
                places.append((known.add(size, _size(value, dim), node, dim), i, dim))
    _find_again(module.graph, known)
    for _, (node, value) in inputs:
        node.meta["val"] = known.described(node, value)
    return GivenSizes(tuple(places))


def _of_data(size: Size) -> str:
    """How a size was written that was made of the data's, whatever has come to be known of it since; else empty."""
    node = node_of(size) if isinstance(size, torch.SymInt) else None
    return str(node.expr) if node is not None and node.of_data else ""


def _sizes_of_data(*nodes: fx.Node) -> set[str]:
    """The data's sizes in what the nodes give, as they were written."""
    sizes = (size for node in nodes for size in sizes_of(node.meta.get("val")))
    return {written for size in sizes if (written := _of_data(size))}


def _find_again(graph: fx.Graph, known: _Known) -> None:
    """Behind each operator whose result has a size that no operand has: which of the known ones that is."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, (torch.Tensor, TensorSpec, torch.SymInt)):
            continue
        dims = [(None, val)] if isinstance(val, torch.SymInt) else enumerate(val.shape)
        again = [(dim, size) for dim, size in dims if isinstance(size, torch.SymInt) and _of_data(size)]
        if not again:
            continue
        source = node.args[0] if node.target is operator.getitem else node
        given = _sizes_of_data(*source.all_input_nodes)  # type: ignore[union-attr]
        new = [(dim, known.number(node, dim, size)) for dim, size in again if _of_data(size) not in given]
        places: list[Any] = [(dim, *number) for dim, number in new if number is not None]
        if not places:
            continue
        with graph.inserting_after(max([node, *(n for _, n, _ in places if isinstance(n, fx.Node))])):
            same = graph.call_function(found_again, (node, tuple(places)))
        same.meta.update(node.meta)
        readers = [user for user in node.users if user is not same and user.target is not aten.sym_size.int]
        node.replace_all_uses_with(same, readers.__contains__)


def found_again(value: Any, places: Sequence[tuple[int | None, Any, bool]]) -> Any:
    """A value of known sizes: (its dimension, the size, whether that is computed from a number of the data); None: a
    number. What it is computed from is only known of a size that is a number."""
    for dim, known, computed in places:
        size = value if dim is None else value.shape[dim]
        expected(size == (int(known) if computed else known))
    return value


@dataclass(slots=True)
class _Known:
    """What is known of the data's sizes in a program.

    Attributes:
        found: of symbols, what they are.
        sizes: symbols for sizes that inputs have, by how these are written with what was found.
        atoms: the same where that is a symbol alone.
        nodes: for symbols with a value, what gives it.
        first: for other symbols, what gives them first.
    """

    graph: fx.Graph
    found: Mapping[Atom, IntExpr]
    sizes: dict[str, torch.SymInt] = field(default_factory=dict)
    atoms: dict[Atom, IntExpr] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    first: dict[str, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                self.nodes.setdefault(str(node.meta["val"]), node)

    def expr(self, size: torch.SymInt) -> IntExpr:
        return _env(size).simplify(expr_of(size).substitute(self.found))

    def has(self, size: torch.SymInt) -> bool:
        return str(self.expr(size)) in self.sizes

    def add(self, size: torch.SymInt, value: int, node: fx.Node, dim: int | None) -> str:
        """A symbol for a size that an input has there; its name."""
        made, written = _env(size).symbol(value, f"a size of {node.name}", min=0), str(self.expr(size))
        name = str(expr_of(made))
        self.sizes[written] = made
        if written.isidentifier():
            self.atoms[intern_symbol(written)] = expr_of(made)
        self.nodes[name] = self._read(node, dim, made)
        return name

    def _read(self, node: fx.Node, dim: int | None, size: torch.SymInt) -> fx.Node:
        """The node of a size that a node gives."""
        if dim is None:
            return node
        behind = node.next
        while node.op == behind.op == "placeholder":
            behind = behind.next
        with self.graph.inserting_before(behind):
            made = self.graph.call_function(aten.sym_size.int, (node, dim))
        made.meta.update(val=size, stack=())
        return made

    def number(self, node: fx.Node, dim: int | None, size: torch.SymInt) -> tuple[object, bool] | None:
        """The node of what a node's size is, or the number, and whether it stands for what is computed from a number of
        the data; None where nothing is known."""
        written, known = str(self.expr(size)), self.size(size)
        if not depends_on_data(known):
            with contextlib.suppress(KeyError):  # a symbol that no input gives
                return materialize(self.graph, known, self.nodes), written in self.sizes and not written.isidentifier()
        elif written in self.first:
            return self.first[written], False
        elif written.isidentifier():
            self.first[written] = self._read(node, dim, size)
        return None

    def size(self, size: Size) -> Size:
        """What a size is written as."""
        if not isinstance(size, torch.SymInt):
            return size
        expr = self.expr(size)
        found = self.sizes.get(str(expr))
        return found if found is not None else _env(size).size(expr.substitute(self.atoms))

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
