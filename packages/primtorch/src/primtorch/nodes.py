"""Nodes of graphs, made and copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.node import Argument, Target, map_arg

# Past a Python function that looks at each assignment to a node.
set_args: Any = vars(fx.Node)["args"].__set__
set_kwargs: Any = vars(fx.Node)["kwargs"].__set__


def new_node(
    graph: fx.Graph, op: str, target: Target, args: Any, kwargs: Any, name: str | None = None, kind: Any = None
) -> fx.Node:
    """`graph.create_node` of arguments without numbers that are symbols.

    Given to `create_node`, they would be walked twice more, in search of those.
    """
    node = graph.create_node(op, target, (), {}, name, kind)
    if args:
        set_args(node, args)
    if kwargs:
        set_kwargs(node, kwargs)
    return node


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """`graph.node_copy` of a node whose inputs are copied: with its name, and what is known of it."""
    args, kwargs = (map_arg(given, copies.__getitem__) if given else given for given in (node.args, node.kwargs))
    made = new_node(graph, node.op, node.target, args, kwargs, node.name, node.type)
    made.meta.update(node.meta)
    return made


def copy_nodes(graph: fx.Graph, source: fx.Graph, copies: dict[fx.Node, fx.Node]) -> Argument:
    """`graph.graph_copy`: copies all nodes that `copies` lacks, and gives what the source returns of them."""
    for node in source.nodes:
        if node.op == "output":
            return map_arg(node.args[0], copies.__getitem__)
        if node not in copies:
            copies[node] = copy_node(graph, node, copies)
    return None
