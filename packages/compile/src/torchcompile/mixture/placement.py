"""Which back end computes which operators of a functional graph, in convex pieces: none waits for itself.

An operator's level is the number of times that a value on the way to it changes hands, so a piece, the operators of one
back end and one level, reads from lower levels alone, and the pieces run in the order of their levels.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from aotautograd.passes import has_effect
from primtorch.frozen import record
from primtorch.memory import is_view
from torchcompile.capability import Capability
from torchcompile.errors import CompileError

HOST = -1  # numbers, and pieces of views alone: nothing is computed in them, so no back end gets them


class NoBackend(CompileError):
    """An operator that no back end of a mixture takes."""


@record
class Piece:
    """Operators that run together.

    Attributes:
        member: place of the back end among those of the mixture, or `HOST`.
        nodes: in the graph's order.
        why: for a person.
    """

    member: int
    nodes: tuple[fx.Node, ...]
    why: str


@dataclass(eq=False)
class _Unit:
    """An operator with the items of its result, which stay together."""

    nodes: list[fx.Node]
    offers: Mapping[int, float]  # what it costs at each back end that takes it, the best one first; none for a number
    light: bool  # computed of no tensor: better made where it is read than handed on
    member: int = HOST
    level: int = 0
    before: list[_Unit] = field(default_factory=list)
    after: list[_Unit] = field(default_factory=list)
    given_up: dict[int, str] = field(default_factory=dict)  # back ends that take it and do not get it: why

    @property
    def node(self) -> fx.Node:
        return self.nodes[0]

    @property
    def is_view(self) -> bool:
        return is_view(self.node.target)

    @property
    def open(self) -> list[int]:
        return [member for member in self.offers if member not in self.given_up]


def is_number(node: fx.Node) -> bool:
    """Whether a node's value is a size or another number, and no tensor."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def place(graph: fx.Graph, names: Sequence[str], capabilities: Sequence[Capability]) -> tuple[Piece, ...]:
    """The pieces of a functional graph, in the order in which they run.

    Raises:
        NoBackend: nobody takes an operator.
    """
    units = _units(graph, names, capabilities)
    for _ in range(len(units) * len(capabilities) + 1):
        _choose(units)
        _order(units)
        pieces = _grouped(units)
        given_up = [_give_up(piece, names, capabilities) for piece in pieces]
        if not any(given_up):
            return tuple(_piece(piece, names) for piece in pieces)
    raise AssertionError("placement has no end, although each round takes an operator from a back end")


def _units(graph: fx.Graph, names: Sequence[str], capabilities: Sequence[Capability]) -> list[_Unit]:
    """In an order in which each comes after those that it reads."""
    units: list[_Unit] = []
    of: dict[fx.Node, _Unit] = {}
    last_effect: _Unit | None = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in of and isinstance(source.meta.get("val"), (tuple, list)):
            of[source].nodes.append(node)
            of[node] = of[source]
            continue
        before = dict.fromkeys(of[n] for n in node.all_input_nodes if n in of)
        tensors = [n for n in node.all_input_nodes if not is_number(n)]
        light = not has_effect(node) and all(n in of and of[n].light for n in tensors)
        unit = of[node] = _Unit([node], _offers(node, names, capabilities), light)
        if has_effect(node):  # they happen in the order of the graph
            if last_effect is not None:
                before[last_effect] = None
            last_effect = unit
        unit.before = list(before)
        for other in before:
            other.after.append(unit)
        units.append(unit)
    return units


def _offers(node: fx.Node, names: Sequence[str], capabilities: Sequence[Capability]) -> Mapping[int, float]:
    if is_number(node):
        return {}
    costs = {place: c.cost_of(node) for place, c in enumerate(capabilities) if c.takes(node)}
    if not costs:
        raise NoBackend(_nobody(node, names))
    return {place: costs[place] for place in sorted(costs, key=lambda place: (costs[place], place))}


def _nobody(node: fx.Node, names: Sequence[str]) -> str:
    stack = node.meta.get("stack", ())
    where = f", at {stack[-1].file}:{stack[-1].line} in {stack[-1].function}" if stack else ""
    return (
        f"no back end of {', '.join(names)} takes {operator_name(node)} ({node.name} of the graph{where}): name one "
        "that takes everything last, as in backend=[..., 'inductor'], or let a capability support it"
    )


def operator_name(node: fx.Node) -> str:
    """An operator for a person: "prims.mm", "aten.mm.default"."""
    return node._pretty_print_target(node.target).removeprefix("primtorch.").removeprefix("torch.ops.")


def _choose(units: Sequence[_Unit]) -> None:
    """The best offer gets an operator. A view goes with who reads it, or who made what it looks at, if they take it:
    then it is no border of its own."""
    for unit in units:
        if unit.offers:
            unit.member = unit.open[0]
    for unit in reversed(units):
        if unit.is_view and unit.offers:
            near = [other.member for other in (*unit.after, *unit.before) if other.member in unit.open]
            unit.member = near[0] if near else unit.member


def _order(units: Sequence[_Unit]) -> None:
    """Levels: each as early as can be; what is made of no tensor then as late as its readers allow."""
    for unit in units:
        unit.level = max((_after(other, unit) for other in unit.before), default=0)
    levels = defaultdict(set)
    for unit in units:
        levels[unit.member].add(unit.level)
    for unit in reversed(units):
        if unit.light and unit.offers and unit.after:
            latest = min(other.level - (_after(unit, other) - unit.level) for other in unit.after)
            unit.level = max((level for level in levels[unit.member] if level <= latest), default=unit.level)


def _after(earlier: _Unit, later: _Unit) -> int:
    """The first level at which `later` can run. Numbers are computed before the pieces of their level."""
    alike = earlier.member == later.member or not earlier.offers
    return earlier.level + (0 if alike else 1)


def _grouped(units: Sequence[_Unit]) -> list[list[_Unit]]:
    pieces: dict[tuple[int, int], list[_Unit]] = {}
    for unit in sorted(units, key=lambda unit: (unit.level, unit.member)):  # stable: within a piece the graph's order
        pieces.setdefault((unit.level, unit.member), []).append(unit)
    return list(pieces.values())


def _give_up(piece: Sequence[_Unit], names: Sequence[str], capabilities: Sequence[Capability]) -> bool:
    """Takes a piece that is not worth its border from its back end, where others take all of it."""
    member = piece[0].member
    computed = [unit for unit in piece if not unit.is_view]
    if member == HOST or not computed or any(len(unit.open) < 2 for unit in computed):
        return False
    border, minimum = capabilities[member].border, capabilities[member].minimum
    saved = sum(unit.offers[unit.open[1]] - unit.offers[member] for unit in computed)
    if len(computed) >= minimum and saved >= border:
        return False
    few = f"{len(computed)} operators in one place, and {names[member]} asks for {minimum}"
    little = f"{names[member]} would save {saved:g} there, and a border costs {border:g}"
    for unit in piece:
        unit.given_up[member] = few if len(computed) < minimum else little
    return True


def _piece(units: Sequence[_Unit], names: Sequence[str]) -> Piece:
    member = units[0].member
    nodes = tuple(node for unit in units for node in unit.nodes)
    if member == HOST:
        return Piece(HOST, nodes, "sizes and numbers")
    if all(unit.is_view for unit in units):
        return Piece(HOST, nodes, "views alone: nothing to compute")
    computed = [unit for unit in units if not unit.is_view]
    refused = dict.fromkeys(text for unit in computed for text in unit.given_up.values())
    if refused:
        return Piece(member, nodes, "; ".join(refused))
    if all(len(unit.offers) == 1 for unit in computed):
        return Piece(member, nodes, f"nobody but {names[member]} takes it" if len(names) > 1 else "the only back end")
    cheapest = any(len(set(unit.offers.values())) > 1 for unit in computed)
    return Piece(member, nodes, "the least cost" if cheapest else "the first that takes it")
