"""The graph of a backward as a record: a process that finds the forward compiles the backward for tangents that were
not met before, and traces nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

import torchinductor
from aotautograd.outlines import bound, spelt
from aotautograd.schemas import BackwardGraph
from primtorch.frozen import record
from primtorch.higher_order import InvokeSubgraph
from primtorch.ledger import own_line
from primtorch.printing import MADE_BY
from primtorch.records import NotARecord, NotAsText
from primtorch.schemas import DONATED, UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv
from torchdynamo.errors import NotExportable, UnsafeArchive
from torchdynamo.exported.targets import function_named, name_of
from torchdynamo.kept.contents import NotKept
from torchdynamo.kept.graphs import CODECS, Node, argument, given
from torchinductor import KeptConstant

NAMESPACES = ("aten", torchinductor.__name__)  # of operators: the program's own are in no graph that is kept


@record
class Region:
    """What a node calls where that is an `InvokeSubgraph`, whose body is the graph at this place."""

    body: int
    sizes: int
    differentiable: tuple[bool, ...]
    tags: frozenset[str]


@record
class KeptNode:
    """A node of a graph.

    Attributes:
        target: a function's name (`torchdynamo.exported.targets`), a region, or what FX has there.
        value: what is known of its value, with expressions for symbolic numbers.
        frames: the user's line behind it, if it is known.
        donated: see `primtorch.schemas.DONATED`.
    """

    op: str
    name: str
    target: str | Region
    args: tuple[object, ...]
    kwargs: dict[str, object]
    value: object
    frames: tuple[UserFrame, ...]
    donated: bool = False


@record
class KeptModule:
    """A graph; a tensor that it holds is at the place of its node."""

    nodes: tuple[KeptNode, ...]
    constants: tuple[KeptConstant, ...]
    made_by: tuple[str, ...]


@record
class KeptBackward:
    """A `BackwardGraph`: that of the backward, behind the bodies of the regions that it calls."""

    modules: tuple[KeptModule, ...]
    behind: tuple[frozenset[int], ...]

    def told(self, lines: Mapping[UserFrame, UserFrame]) -> KeptBackward:
        """The same with other words for the user's lines; a line that has none is left out."""
        return dataclasses.replace(self, modules=tuple(_told(module, lines) for module in self.modules))


CLASSES = (KeptBackward, KeptModule, KeptNode, Region, Node)
__all__ = ["CLASSES", "CODECS", "NAMESPACES", "KeptBackward", "made", "written"]


def _told(module: KeptModule, lines: Mapping[UserFrame, UserFrame]) -> KeptModule:
    nodes = [
        dataclasses.replace(node, frames=tuple(lines[frame] for frame in node.frames if frame in lines))
        for node in module.nodes
    ]
    return dataclasses.replace(module, nodes=tuple(nodes))


# -- writing -------------------------------------------------------------------------------------


def written(graph: BackwardGraph, lines: Mapping[UserFrame, UserFrame]) -> KeptBackward:
    """The record of a graph, with other words for the user's lines; a line that has none is left out.

    Raises:
        NotAsText: it holds what has no form there: large tensors, operators of the program's own.
    """
    writer = _Writer(lines)
    writer.module(graph.module)
    return KeptBackward(tuple(writer.modules), graph.behind)


class _Writer:
    """Graphs in an order in which each comes behind those that it calls."""

    def __init__(self, lines: Mapping[UserFrame, UserFrame]) -> None:
        self.lines = lines
        self.modules: list[KeptModule] = []
        self.bodies: dict[fx.GraphModule, int] = {}  # calls of one body share it
        # By identity, of what the graphs hold meanwhile: many nodes have one stack, and call one operator.
        self.frames: dict[int, tuple[UserFrame, ...]] = {}
        self.names: dict[int, str] = {}

    def module(self, module: fx.GraphModule) -> int:
        places: dict[fx.Node, Node] = {}
        nodes: list[KeptNode] = []
        constants: list[KeptConstant] = []
        for place, node in enumerate(module.graph.nodes):
            if node.op == "get_attr":
                constants.append(_constant(module, node, place))
            nodes.append(self.node(node, places))
            places[node] = Node(place)
        self.modules.append(KeptModule(tuple(nodes), tuple(constants), tuple(module.meta.get(MADE_BY, ()))))
        return len(self.modules) - 1

    def node(self, node: fx.Node, places: Mapping[fx.Node, Node]) -> KeptNode:
        try:
            args, kwargs = argument(tuple(node.args), places), argument(dict(node.kwargs), places)
            target = self.target(node)
        except (NotExportable, NotKept) as error:
            raise NotAsText(str(error)) from None
        stack = node.meta.get("stack", ())
        frames = self.frames.get(id(stack))
        if frames is None:
            line = own_line(stack)
            told = None if line is None else self.lines.get(line)
            self.frames[id(stack)] = frames = () if told is None else (told,)
        value = _value(node.meta.get("val"))
        donated = bool(node.meta.get(DONATED))
        return KeptNode(node.op, node.name, target, args, kwargs, value, frames, donated)  # type: ignore[arg-type]

    def target(self, node: fx.Node) -> str | Region:
        if node.op != "call_function":
            return str(node.target)
        if not isinstance(node.target, InvokeSubgraph):
            name = self.names.get(id(node.target))
            if name is None:
                self.names[id(node.target)] = name = name_of(node.target)
            return name
        (body,) = node.target.bodies
        assert isinstance(body, fx.GraphModule)
        if body not in self.bodies:
            self.bodies[body] = self.module(body)
        return Region(self.bodies[body], node.target.sizes, node.target.differentiable, node.target.tags)


def _constant(module: fx.GraphModule, node: fx.Node, place: int) -> KeptConstant:
    held = getattr(module, str(node.target), None)
    kept = torchinductor.kept_constant(place, held) if type(held) is torch.Tensor else None
    if kept is None:
        raise NotAsText(f"{node.op} {node.target}")
    return kept


def _value(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(map(_value, value))
    return spelt(TensorSpec.of(value) if isinstance(value, torch.Tensor) else value)


# -- reading -------------------------------------------------------------------------------------


def made(kept: KeptBackward, env: ShapeEnv | None) -> BackwardGraph:
    """The graph of a record, over symbols of an environment.

    Raises:
        NotARecord: it calls what no graph that is kept does.
    """
    modules: list[fx.GraphModule] = []
    for module in kept.modules:
        modules.append(_module(module, modules, env))
    return BackwardGraph(modules[-1], kept.behind)


def _module(kept: KeptModule, bodies: Sequence[fx.GraphModule], env: ShapeEnv | None) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for row in kept.nodes:
        target = _target(row, bodies)
        node = graph.create_node(row.op, target, given(row.args, nodes), given(row.kwargs, nodes), name=row.name)
        if row.op != "output":
            node.meta["val"] = bound(row.value, env)
        node.meta["stack"] = row.frames
        if row.donated:
            node.meta[DONATED] = True
        nodes.append(node)
    constants = {str(nodes[constant.slot].target): constant.tensor() for constant in kept.constants}
    module = _LazyGraphModule(constants, graph, "Backward")
    module.meta[MADE_BY] = kept.made_by
    return module


def _target(row: KeptNode, bodies: Sequence[fx.GraphModule]) -> fx.node.Target:
    if isinstance(row.target, Region):
        called = row.target
        return InvokeSubgraph((bodies[called.body],), called.sizes, called.differentiable, tags=called.tags)
    try:
        return function_named(row.target, NAMESPACES) if row.op == "call_function" else row.target
    except UnsafeArchive as error:
        raise NotARecord(str(error)) from None
