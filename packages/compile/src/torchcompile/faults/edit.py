"""Smaller programs of a program: parts of its graph, with values that it computed as inputs. Each gives a new one."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchcompile.faults.judge import apart, copied
from torchcompile.faults.schemas import Program
from torchinductor.program import Value

_KEPT_FACTS = ("stack",)  # at the nodes; what else capture noted is said anew by whoever compiles the part


class _Values(fx.Interpreter):
    """Each node's value as it was when it was made: a later operator may write to it."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, object] = {}

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        self.values[n.name] = copied(value)
        return value


def values_of(program: Program) -> dict[str, object]:
    """What eager computes, by the names of the nodes."""
    run = _Values(program.module)
    with apart():
        run.run(*(copied(value) for value in program.inputs), enable_io_processing=False)
    return run.values


def plain(program: Program) -> Program:
    """The program over tensors alone: sizes are the numbers that they are in its inputs, constants are inputs."""
    module = program.module
    values = values_of(program)
    numbers = {n.name for n in module.graph.nodes if _is_number(values.get(n.name)) and n.op != "output"}
    constants = {
        n.name
        for n in module.graph.find_nodes(op="get_attr")
        if isinstance(value := values[n.name], torch.Tensor) and not value.requires_grad
    }
    return part(program, values, as_inputs=constants, as_numbers=numbers)


def part(
    program: Program,
    values: Mapping[str, Any],
    *,
    as_inputs: Collection[str] = (),
    as_numbers: Collection[str] = (),
    removed: Collection[str] = (),
    outputs: Sequence[str] | None = None,
) -> Program:
    """A part of a program.

    Args:
        values: see `values_of`.
        as_inputs, as_numbers: nodes that are not computed: their values are given, or written out.
        removed: nodes whose results nobody uses.
        outputs: nodes to give out, in the place of what the program does.

    What nobody reads any more goes. An operator whose result nobody read before stays: it is there for what it does.
    """
    graph = fx.Graph()
    new: dict[fx.Node, Any] = {}
    inputs: list[Value] = []
    source = program.module.graph
    given = dict(zip(source.find_nodes(op="placeholder"), program.inputs, strict=True))
    names = {node.name: node for node in source.nodes}
    (end,) = source.find_nodes(op="output")
    wanted: Any = end.args[0] if outputs is None else tuple(names[name] for name in outputs)
    alive = _alive(source, wanted, {*as_inputs, *as_numbers}, set(removed))
    for node in source.nodes:  # inputs stand first
        if node in alive and node.name not in as_numbers and (node.op == "placeholder" or node.name in as_inputs):
            new[node] = graph.placeholder(node.name)
            new[node].meta = _facts(node, program.described)
            inputs.append(given[node] if node in given else _as_leaf(values[node.name]))
    for node in source.nodes:
        if node not in alive or node in new:
            continue
        if node.name in as_numbers:
            new[node] = values[node.name]
        elif node.op != "output":
            new[node] = graph.node_copy(node, lambda n: new[n])
            new[node].meta = _facts(node, program.described)
    graph.output(fx.node.map_arg(wanted, lambda n: new[n]))
    return Program(fx.GraphModule(program.module, graph), tuple(inputs), program.described)


def _alive(source: fx.Graph, wanted: Any, given: set[str], removed: set[str]) -> set[fx.Node]:
    """The nodes that a part consists of."""
    alive: set[fx.Node] = set()
    work: list[fx.Node] = []
    fx.node.map_arg(wanted, work.append)
    work += [n for n in source.nodes if n.op.startswith("call") and not n.users and n.name not in removed]
    while work:
        node = work.pop()
        if node in alive or (node.name in removed and not node.users):
            continue
        alive.add(node)
        if node.name not in given:
            work += node.all_input_nodes
    return alive


def _facts(node: fx.Node, described: bool) -> dict[str, object]:
    if described:
        return dict(node.meta)
    return {key: node.meta[key] for key in _KEPT_FACTS if key in node.meta}


def _as_leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, bool)) or (
        isinstance(value, tuple) and bool(value) and all(map(_is_number, value))
    )


def tensors_of(program: Program, values: Mapping[str, object]) -> list[str]:
    """The operators that give one tensor, by name."""
    return [node.name for node in program.calls if isinstance(values.get(node.name), torch.Tensor)]


def up_to(program: Program, values: Mapping[str, object], last: int, everything: bool) -> Program:
    """The part that ends with one of `tensors_of`, and gives out this or every one of them."""
    names = tensors_of(program, values)[: last + 1]
    order = {node.name: place for place, node in enumerate(program.module.graph.nodes)}
    behind = {n.name for n in program.calls if order[n.name] > order[names[-1]] and not n.users}
    return part(program, values, removed=behind, outputs=names if everything else names[-1:])


def resized(program: Program, before: int, after: int) -> Program:
    """The program with one number in the place of another, in the shapes of its inputs and in its arguments.

    Raises:
        RuntimeError: an input has strides that do not follow from a shape.
    """

    def number(value: object) -> Any:
        return after if type(value) is int and value == before else value

    graph = fx.Graph()
    graph.output(graph.graph_copy(program.module.graph, {}))
    for node in graph.nodes:
        if node.op.startswith("call") and node.target is not operator.getitem:
            node.args, node.kwargs = (fx.node.map_aggregate(held, number) for held in (node.args, node.kwargs))
    inputs: list[Value] = []
    for value in program.inputs:
        if isinstance(value, torch.Tensor) and before in value.shape:
            cut = value.detach()
            for dim, size in enumerate(value.shape):
                if size == before:
                    cut = cut.narrow(dim, 0, after)
            dense = torch.empty_like(cut)  # in the order of its dimensions
            if cut.dtype is torch.int64 and before > after:
                cut = cut.clamp(max=max(after - 1, 0))
            inputs.append(dense.copy_(cut).requires_grad_(value.requires_grad))
        else:
            inputs.append(value)
    return Program(fx.GraphModule(program.module, graph), tuple(inputs))
