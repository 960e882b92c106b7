"""The graph of a backward as a record: a process that finds the forward compiles the backward for tangents that were
not met before, and traces nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

import torchinductor
from aotautograd.outlines import bound, spelt
from aotautograd.schemas import BackwardGraph
from primtorch.ledger import own_line
from primtorch.printing import MADE_BY
from primtorch.records import NotARecord, NotAsText
from primtorch.schemas import UserFrame
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv
from torchdynamo.errors import NotExportable, UnsafeArchive
from torchdynamo.exported.targets import function_named, name_of
from torchdynamo.kept.contents import NotKept
from torchdynamo.kept.graphs import CODECS, Node, argument, given
from torchinductor import KeptConstant

NAMESPACES = ("aten", torchinductor.__name__)  # of operators: the program's own are in no graph that is kept


@dataclass(frozen=True, slots=True)
class KeptNode:
    """A node of the graph.

    Attributes:
        target: a function's name (`torchdynamo.exported.targets`), or what FX has there.
        value: what is known of its value, with expressions for symbolic numbers.
        frames: the user's line behind it, if it is known.
    """

    op: str
    name: str
    target: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    value: object
    frames: tuple[UserFrame, ...]


@dataclass(frozen=True, slots=True)
class KeptBackward:
    """A `BackwardGraph`, with the passes that made it. A tensor that the graph holds is at the place of its node."""

    nodes: tuple[KeptNode, ...]
    constants: tuple[KeptConstant, ...]
    behind: tuple[frozenset[int], ...]
    made_by: tuple[str, ...]


CLASSES = (KeptBackward, KeptNode, Node)
__all__ = ["CLASSES", "CODECS", "NAMESPACES", "KeptBackward", "KeptNode", "made", "written"]


def written(graph: BackwardGraph) -> KeptBackward:
    """The record of a graph.

    Raises:
        NotAsText: it holds what has no form there: graphs within it, large tensors, operators of the program's own.
    """
    places: dict[fx.Node, int] = {}
    constants: list[KeptConstant] = []
    nodes: list[KeptNode] = []
    for place, node in enumerate(graph.module.graph.nodes):
        if node.op == "get_attr":
            constants.append(_constant(graph.module, node, place))
        try:
            target = name_of(node.target) if node.op == "call_function" else str(node.target)
            args, kwargs = argument(tuple(node.args), places), argument(dict(node.kwargs), places)
        except (NotExportable, NotKept) as error:
            raise NotAsText(str(error)) from None
        line = own_line(node.meta.get("stack", ()))
        value = _value(node.meta.get("val"))
        frames = (line,) if line is not None else ()
        nodes.append(KeptNode(node.op, node.name, target, _plain(args), _plain(kwargs), value, frames))
        places[node] = place
    return KeptBackward(tuple(nodes), tuple(constants), graph.behind, tuple(graph.module.meta.get(MADE_BY, ())))


def _constant(module: fx.GraphModule, node: fx.Node, place: int) -> KeptConstant:
    held = getattr(module, str(node.target), None)
    kept = torchinductor.kept_constant(place, held) if type(held) is torch.Tensor else None
    if kept is None:
        raise NotAsText(f"{node.op} {node.target}")
    return kept


def _plain(argument: Any) -> Any:
    """An argument that is equal to what is read again."""
    if type(argument) is float and math.isnan(argument):
        return math.nan
    if type(argument) in (tuple, list):
        return type(argument)(map(_plain, argument))
    return {key: _plain(part) for key, part in argument.items()} if type(argument) is dict else argument


def _value(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(map(_value, value))
    return spelt(TensorSpec.of(value) if isinstance(value, torch.Tensor) else value)


def made(kept: KeptBackward, env: ShapeEnv | None) -> BackwardGraph:
    """The graph of a record, over symbols of an environment.

    Raises:
        NotARecord: it calls what no graph that is kept does.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for row in kept.nodes:
        try:
            target = function_named(row.target, NAMESPACES) if row.op == "call_function" else row.target
        except UnsafeArchive as error:
            raise NotARecord(str(error)) from None
        node = graph.create_node(row.op, target, given(row.args, nodes), given(row.kwargs, nodes), name=row.name)
        if row.op != "output":
            node.meta["val"] = bound(row.value, env)
        node.meta["stack"] = row.frames
        nodes.append(node)
    constants = {kept.nodes[constant.slot].target: constant.tensor() for constant in kept.constants}
    module = _LazyGraphModule(constants, graph, "Backward")
    module.meta[MADE_BY] = kept.made_by
    return BackwardGraph(module, kept.behind)
