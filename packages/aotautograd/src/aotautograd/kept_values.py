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
from primtorch.symbolic import expr_of

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
    """`run` takes values of the symbols of these names, then the saved tensors at the places `reads`."""

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
            given = (*(sizes[name] for name in program.symbols), *(saved[place] for place in program.reads))
            found |= dict(zip(made, program.run(*given), strict=True))
        return [found[value] for value in values]

    def _follow_from_saved(self) -> set[fx.Node]:
        """Nodes that are saved, or computed from such alone, and without a draw."""
        known: set[fx.Node] = set()
        for node in self._module.graph.nodes:
            made = node.op == "call_function" and not is_random(node) and known.issuperset(node.all_input_nodes)
            if node.name in self._place or made:
                known.add(node)
        return known

    def _program(self, wanted: Sequence[fx.Node]) -> _Program:
        """What the values are made from, and what makes them."""
        needed: set[fx.Node] = set()
        work = list(wanted)
        while work:
            node = work.pop()
            if node not in needed:
                needed.add(node)
                work.extend(() if node.name in self._place else node.all_input_nodes)
        ordered = [node for node in self._module.graph.nodes if node in needed]
        given = [node for node in ordered if node.name in self._place]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        sizes = (expr_of(size) for n in ordered for size in sizes_of(n.meta.get("val")))
        in_sizes = {name for size in sizes for name in size.substitute(self._found).symbols()}
        taken = [n for n in self._module.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.SymInt)]
        symbols = {n: name for n in taken if (name := str(expr_of(n.meta["val"]))) in in_sizes}
        for node in (*symbols, *given):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta.update(node.meta, val=self._as_saved.get(node.name, node.meta["val"]))
        for node in ordered:
            if node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in wanted))
        module = _LazyGraphModule(self._module, graph, "KeptValues")
        run = self._compile(module, [copies[n].meta["val"] for n in (*symbols, *given)])
        return _Program(tuple(symbols.values()), tuple(self._place[node.name] for node in given), run)
