"""Sizes that only the data tells, in a program that is made once they are known: its inputs have them.

A derivative of the backward takes tangents and kept values of such sizes, and computes others again. A number that the
program finds anew is a symbol of its own there, as in the forward; those that its inputs have are symbols with a value,
like any size of an input, so that one program serves the next call, too.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from aotautograd.errors import DoubleBackwardUnavailable
from aotautograd.inputs import sizes_of
from primtorch.frozen import record
from primtorch.layout import dense_like, is_dense
from primtorch.spec import Size, TensorSpec, spec_of
from primtorch.symbolic import ShapeEnv, constant, depends_on_data, expected, expr_of, materialize, relate
from primtorch.symbolic.expr import Atom, IntExpr, Symbol, atom_expr
from primtorch.symbolic.sym_node import node_of

aten = torch.ops.aten
Numbers: TypeAlias = Mapping[str, int | float]


@record
class Given:
    """A symbol that a size of an input tells, which is `factor` times its value, and `rest`.

    Attributes:
        place: of the input, and the dimension; None: it is a number itself.
    """

    name: str
    place: int
    dim: int | None
    factor: IntExpr = constant(1)
    rest: IntExpr = constant(0)

    def of(self, values: Sequence[object], sizes: Numbers) -> int:
        """The value in a call; `sizes`: of the symbols that are known."""
        size = _size(values[self.place], self.dim)
        return (size - self.rest.evaluate(sizes)) // self.factor.evaluate(sizes)  # type: ignore[arg-type]  # integers


@record
class GivenSizes:
    """Symbols that a program's inputs tell and its graph does not.

    Attributes:
        symbols: what inputs have as a size.
        added: what sizes of inputs are computed from: the program's first inputs.
    """

    symbols: tuple[Given, ...] = ()
    added: tuple[Given, ...] = ()

    def of(self, values: Sequence[object], sizes: Numbers) -> dict[str, int]:
        """The values of the symbols in a call; `sizes`: those of the graph's."""
        found: dict[str, int] = {}
        for given in (*self.symbols, *self.added):
            found[given.name] = given.of(values, {**sizes, **found})
        return found

    def inputs(self, sizes: Numbers) -> list[int]:
        """The program's first inputs, where all symbols have these values."""
        return [int(sizes[given.name]) for given in self.added]


def name_given_sizes(
    module: fx.GraphModule, values: Sequence[object], found: Mapping[Atom, IntExpr], sizes: Numbers
) -> GivenSizes:
    """Describes the placeholders whose sizes depend on data by symbols that have the values given, and says of what the
    program computes again that it has the same sizes.

    Args:
        found: what the trace that the program is made of came to know of the data's numbers.
        sizes: the values of the symbols that the graph has.
    """
    known = _Known(module.graph, found)
    inputs = list(enumerate(zip(module.graph.find_nodes(op="placeholder"), values, strict=True)))
    inputs = [(i, (node, value)) for i, (node, value) in inputs if _sizes_of_data(node)]
    of_data = [
        (Given("", i, dim), node, size)
        for i, (node, _) in inputs
        for dim, size in _dims(node)
        if isinstance(size, torch.SymInt) and _of_data(size)
    ]
    symbols: list[Given] = []
    added: list[Given] = []

    def name(add: Callable[[Given, fx.Node, torch.SymInt], Given | None], names: list[Given]) -> bool:
        """Names the first size that `add` names."""
        for given, node, size in of_data:
            if depends_on_data(known.size(size)) and (made := add(given, node, size)) is not None:
                names.append(made)
                return True
        return False

    def value(given: Given) -> int:
        return given.of(values, {**sizes, **GivenSizes(tuple(symbols), tuple(added)).of(values, sizes)})

    while (
        name(lambda given, node, size: known.add(given, node, size, value, alone=True), symbols)
        or name(lambda given, node, size: known.solve(given, node, size, value), added)
        or name(lambda given, node, size: known.add(given, node, size, value), symbols)
    ):
        pass
    _find_again(module.graph, known)
    for _, (node, given) in inputs:
        node.meta["val"] = known.described(node, given)
    return GivenSizes(tuple(symbols), tuple(added))


def _dims(node: fx.Node) -> Iterable[tuple[int | None, Size]]:
    """The sizes of what a node gives, by dimension; None: a number itself."""
    val = node.meta["val"]
    return [(None, val)] if isinstance(val, torch.SymInt) else enumerate(val.shape)


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
        again = [(dim, size) for dim, size in _dims(node) if isinstance(size, torch.SymInt) and _of_data(size)]
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
    """A value of known sizes: (its dimension, the size, whether that is computed from numbers of the data); None: a
    number. Where none of those is known by all the others, they are only known of a size that is a number."""
    for dim, known, computed in places:
        size = value if dim is None else value.shape[dim]
        expected(size == known)
        if computed and depends_on_data(size):
            expected(size == int(known))
    return value


@dataclass(slots=True)
class _Known:
    """What is known of the data's sizes in a program.

    Attributes:
        found: of symbols, what they are.
        sizes: symbols for sizes that inputs have, by how these are written with what was found.
        atoms: what is known by them of the data's numbers.
        nodes: for symbols with a value, what gives it.
        first: for other symbols, what gives them first.
        last: of the placeholders that were added.
    """

    graph: fx.Graph
    found: Mapping[Atom, IntExpr]
    sizes: dict[str, torch.SymInt] = field(default_factory=dict)
    atoms: dict[Atom, IntExpr] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    first: dict[str, fx.Node] = field(default_factory=dict)
    last: fx.Node | None = None

    def __post_init__(self) -> None:
        for node in self.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)):
                self.nodes.setdefault(str(node.meta["val"]), node)

    def expr(self, size: torch.SymInt) -> IntExpr:
        """A size with what was found."""
        return _env(size).simplify(expr_of(size).substitute(self.found))

    def named(self, size: torch.SymInt) -> IntExpr:
        """A size with the symbols that there are for the data's."""
        return self.expr(size).substitute(self.atoms)

    def add(
        self, given: Given, node: fx.Node, size: torch.SymInt, value: Callable[[Given], int], alone: bool = False
    ) -> Given | None:
        """A symbol for a size that an input has there; `alone`: where that tells one of the data's by the others."""
        line = _as_line(self.named(size), _env(size))
        plain = line is not None and line.factor == constant(1) and line.rest == constant(0)
        if alone and not plain:
            return None
        made = self._symbol(size, value(given), node)
        self.sizes[str(self.expr(size))] = made
        if line is not None and plain:
            self._know(line, made)
        self.nodes[str(expr_of(made))] = self._read(node, given.dim, made)
        return replace(given, name=str(expr_of(made)))

    def solve(self, given: Given, node: fx.Node, size: torch.SymInt, value: Callable[[Given], int]) -> Given | None:
        """A symbol for what an input's size is computed from, as far as that is known to tell it; a new placeholder
        gives it. A row of `5*u0` elements tells `u0`, one of `s1*u0 + s1*u1` their sum."""
        line = _as_line(self.named(size), _env(size))
        if line is None:
            return None
        given = replace(given, factor=line.factor, rest=line.rest)
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first if self.last is None else self.last.next):
            self.last = self.graph.placeholder(f"size_of_{node.name}")
        made = self.last.meta["val"] = self._symbol(size, value(given), self.last)
        self._know(line, made)
        self.nodes[str(expr_of(made))] = self.last
        return replace(given, name=str(expr_of(made)))

    def _know(self, line: _Line, made: torch.SymInt) -> None:
        """What one of the data's is, from here on."""
        known: dict[Atom, IntExpr] = {line.atom: (expr_of(made) - line.others) * constant(line.sign)}
        self.atoms = {atom: value.substitute(known) for atom, value in self.atoms.items()} | known

    def _symbol(self, size: torch.SymInt, value: int, node: fx.Node) -> torch.SymInt:
        return _env(size).symbol(value, f"a size of {node.name}", min=0)

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
        found = self.sizes.get(str(self.expr(size)))
        return found if found is not None else _env(size).size(self.named(size))

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


@record
class _Line:
    """`factor * (sign * atom + others) + rest`: what is in parentheses is made of the data's numbers, which the rest
    are not, and is not negative."""

    factor: IntExpr
    sign: int
    atom: Atom
    others: IntExpr
    rest: IntExpr


def _as_line(expr: IntExpr, env: ShapeEnv) -> _Line | None:
    """A size as a line; None where it is none, or does not tell what is in parentheses as far as is known."""
    ours = {m: c for m, c in expr.terms.items() if any(_unknown(atom_expr(atom), env) for atom in m)}
    if not ours:
        return None
    rest = expr - IntExpr(ours)
    given = [[atom for atom in m if not _unknown(atom_expr(atom), env)] for m in ours]
    common = given[0] if all(atoms == given[0] for atoms in given) else []
    factor = IntExpr({tuple(common): math.gcd(*ours.values())})
    total = IntExpr(ours) // factor
    positive = rest == constant(0) or all(c > 0 for c in total.terms.values())
    if not positive or total * factor != IntExpr(ours) or not env.decide(relate("gt", factor, constant(0))):
        return None
    single = [(m[0], c) for m, c in total.terms.items() if len(m) == 1 and abs(c) == 1]
    for atom, sign in sorted(single, key=lambda one: not isinstance(one[0], Symbol)):  # symbols first
        others = total - atom_expr(atom) * constant(sign)
        if others.substitute({atom: constant(0)}) == others == others.substitute({atom: constant(1)}):
            return _Line(factor, sign, atom, others, rest)
    return None


def _unknown(expr: IntExpr, env: ShapeEnv) -> bool:
    return any(not env.symbols[name].backed for name in expr.symbols())


def _env(size: torch.SymInt) -> ShapeEnv:
    env: ShapeEnv = size.node.env
    return env


def _size(value: object, dim: int | None) -> int:
    if isinstance(value, torch.Tensor) and dim is not None:
        return int(value.shape[dim])
    assert isinstance(value, int)
    return value
