"""Values of the forward that have no history, from what it kept: draws, and what a program computes under `no_grad`.

A derivative of the backward computes the forward again, from its inputs. It cannot draw again, and it cannot compute
again from an input that the program has written; but it may be given the value itself, since no derivative passes it.
Where the joint graph was lowered, what was kept has names of the lowered graph: the value is looked for there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from aotautograd.inputs import sizes_of
from aotautograd.partitioners import is_backward
from aotautograd.passes import is_random, output_values, read_by
from aotautograd.schemas import FOUND, HISTORY, FunctionResult, History, JointGraph
from primtorch.frozen import record
from primtorch.spec import TensorSpec
from primtorch.symbolic import expr_of
from primtorch.symbolic.sym_node import node_of

aten = torch.ops.aten

# A graph and the specs of what it takes -> its callable.
CompileInference = Callable[[fx.GraphModule, list[object]], Callable[..., Sequence[object]]]
# Nodes of the joint graph -> a graph that returns their values, with the names that the saved tensors have.
ValuesOf = Callable[[Sequence[fx.Node]], fx.GraphModule]


def without_history(joint: JointGraph) -> list[fx.Node]:
    """The forward's tensors that no derivative passes: what is made of draws alone, the mask of each dropout, what the
    program has outside of autograd's history, and what an autograd function makes of draws: its call has the history.
    """
    nodes = [n for n in joint.module.graph.nodes if not is_backward(n)]
    drawn, values = _depends_on_draws(nodes), _depends_on_values(nodes)
    return [
        n
        for n in nodes
        if n.op == "call_function"
        and isinstance(n.meta.get("val"), torch.Tensor)
        and (
            (n in drawn and n not in values)
            or n.meta.get(HISTORY) is History.NONE
            or is_dropout_mask(n)
            or is_resumed(n)
        )
    ]


def is_resumed(node: fx.Node) -> bool:
    """Whether a node is what a call gives that is resumed behind its forward."""
    history = node.meta.get(HISTORY)
    return isinstance(history, FunctionResult) and bool(history.call.given)


def is_dropout_mask(node: fx.Node) -> bool:
    """Whether a node is the second result of `native_dropout`: which elements were kept."""
    source = node.args[0] if node.target is operator.getitem else None
    is_dropout = isinstance(source, fx.Node) and source.target is aten.native_dropout.default
    return is_dropout and bool(node.args[1] == 1)


def _depends_on_draws(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for n in nodes:
        if n.op == "call_function" and (is_random(n) or any(a in found for a in n.all_input_nodes)):
            found.add(n)
    return found


def _depends_on_values(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found = {n for n in nodes if n.op == "placeholder"}
    for n in nodes:
        if any(a in found for a in read_by(n)):
            found.add(n)
    return found


@record
class _Program:
    """`run` takes sizes of saved tensors, by (place, dim), values of the symbols of these names, then the saved tensors
    at the places `reads`."""

    sizes: tuple[tuple[int, int | None], ...]
    symbols: tuple[str, ...]
    reads: tuple[int, ...]
    run: Callable[..., Sequence[object]]


class KeptValues:
    """The values of the forward without history that follow from its saved tensors.

    Args:
        saved: for each saved tensor, the name of the node whose value it is.
        copies: the nodes that give these tensors: a part of a memory is saved as a copy, in a layout of its own.
    """

    def __init__(
        self,
        joint: JointGraph,
        saved: Sequence[str],
        copies: Sequence[fx.Node],
        values_of: ValuesOf,
        compile_inference: CompileInference,
    ) -> None:
        nodes = without_history(joint)
        self._place = {name: place for place, name in enumerate(saved)}
        self._as_saved = {name: copy.meta["val"] for name, copy in zip(saved, copies, strict=False)}
        self._module = values_of(nodes)
        self._found = joint.module.meta.get(FOUND, {})
        self._telling: dict[str, fx.Node] = {}  # of the data's numbers: what has such a size
        known = self._follow_from_saved()
        results = zip(nodes, output_values(self._module.graph), strict=True)
        self._values = {n.name: value for n, value in results if isinstance(value, fx.Node) and value in known}
        self._compile = compile_inference
        self._programs: dict[tuple[str, ...], _Program] = {}

    @property
    def names(self) -> frozenset[str]:
        """Of nodes of the joint graph."""
        return frozenset(self._values)

    def __call__(self, names: Sequence[str], saved: Sequence[object], sizes: Mapping[str, int | float]) -> list[object]:
        """The values of these names, in one call's saved tensors and values of symbols."""
        values = [self._values[name] for name in names]
        made = [value for value in dict.fromkeys(values) if value.name not in self._place]
        found = {value: saved[self._place[value.name]] for value in values if value.name in self._place}
        if made:
            key = tuple(value.name for value in made)
            if key not in self._programs:
                self._programs[key] = self._program(made)
            program = self._programs[key]
            numbers = [_size(saved[place], dim) for place, dim in program.sizes]
            given = (*numbers, *(sizes[name] for name in program.symbols), *(saved[place] for place in program.reads))
            found |= dict(zip(made, program.run(*given), strict=True))
        return [found[value] for value in values]

    def _follow_from_saved(self) -> set[fx.Node]:
        """Nodes that are saved, or computed from such alone, and without a draw; of sizes that these tell: a tensor of
        `u0 + u1` rows tells neither."""
        known: set[fx.Node] = set()
        saved = [node for node in self._module.graph.nodes if node.name in self._place]
        told = self._telling = {name: node for node in saved for name in _own_sizes(node)}
        for node in self._module.graph.nodes:
            made = node.op == "call_function" and not is_random(node) and known.issuperset(node.all_input_nodes)
            if node.name in self._place:
                known.add(node)
            elif made:
                read = set[str]().union(*map(self._of_data, node.all_input_nodes))
                untold = (self._of_data(node) | read) - told.keys()
                found = untold & self._finds(node)
                if untold == found:
                    known.add(node)
                    told |= dict.fromkeys(found, node)
        return known

    def _of_data(self, node: fx.Node) -> set[str]:
        """The names of the data's numbers in a value's sizes."""
        found: set[str] = set()
        for size in sizes_of(node.meta.get("val")):
            symbols = node_of(size).env.symbols
            found |= {s for s in expr_of(size).substitute(self._found).symbols() if not symbols[s].backed}
        return found

    def _finds(self, node: fx.Node) -> set[str]:
        """The names of those that an operator counts itself."""
        return _own_sizes(node).keys() & self._of_data(node).difference(*map(self._of_data, node.all_input_nodes))

    def _program(self, wanted: Sequence[fx.Node]) -> _Program:
        """What the values are made from, and what makes them."""
        needed: set[fx.Node] = set()
        told: set[str] = set()
        work = list(wanted)
        while work:
            node = work.pop()
            if node not in needed:
                needed.add(node)
                told |= _own_sizes(node).keys()
                work.extend(() if node.name in self._place else node.all_input_nodes)
            if not work:
                untold = set[str]().union(*map(self._of_data, needed)) - told
                work.extend(self._telling[name] for name in untold)
        ordered = [node for node in self._module.graph.nodes if node in needed]
        given = [node for node in ordered if node.name in self._place]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        sizes = (expr_of(size) for n in ordered for size in sizes_of(n.meta.get("val")))
        in_sizes = {name for size in sizes for name in size.substitute(self._found).symbols()}
        taken = [n for n in self._module.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.SymInt)]
        symbols = {n: name for n in taken if (name := str(expr_of(n.meta["val"]))) in in_sizes}
        numbers, places = self._size_inputs(graph, ordered)
        for node in (*symbols, *given):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta.update(node.meta, val=self._as_saved.get(node.name, node.meta["val"]))
        for node in ordered:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in wanted))
        module = _LazyGraphModule(self._module, graph, "KeptValues")
        run = self._compile(module, [n.meta["val"] for n in (*numbers, *map(copies.__getitem__, (*symbols, *given)))])
        reads = tuple(self._place[node.name] for node in given)
        return _Program(places, tuple(symbols.values()), reads, run)

    def _size_inputs(
        self, graph: fx.Graph, ordered: Sequence[fx.Node]
    ) -> tuple[list[fx.Node], tuple[tuple[int, int | None], ...]]:
        """Placeholders of numbers of the data that saved values tell, and where: (place, dim)."""
        found = set[str]().union(*(self._finds(node) for node in ordered if node.name not in self._place))
        nodes, places = dict[str, fx.Node](), []
        for node in ordered:
            for name, (dim, size) in _own_sizes(node).items() if node.name in self._place else ():
                if name in self._of_data(node) - found - nodes.keys():
                    nodes[name] = graph.placeholder(f"size_of_{node.name}")
                    nodes[name].meta.update(val=size)
                    places.append((self._place[node.name], dim))
        return list(nodes.values()), tuple(places)


def _own_sizes(node: fx.Node) -> dict[str, tuple[int | None, torch.SymInt]]:
    """The sizes of a value that are symbols alone, with their dims; None: a number itself."""
    val = node.meta.get("val")
    sizes = enumerate(val.shape) if isinstance(val, (torch.Tensor, TensorSpec)) else [(None, val)]
    return {str(expr_of(size)): (dim, size) for dim, size in sizes if isinstance(size, torch.SymInt)}


def _size(value: object, dim: int | None) -> object:
    return value.shape[dim] if isinstance(value, torch.Tensor) and dim is not None else value
