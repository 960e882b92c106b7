"""Nodes that are made and copied past FX's own ways: what FX's ways give."""

from __future__ import annotations

import operator

import torch
from torch import fx

from primtorch.nodes import copy_node, copy_nodes, new_node


def example() -> fx.Graph:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    z = graph.call_function(torch.add, (x, y), {"alpha": 2})
    parts = graph.call_function(torch.split, (z, [1, 2]), {"dim": slice(x, None)})
    graph.output((graph.call_function(operator.getitem, (parts, 0)), [z, x], None))
    for number, node in enumerate(graph.nodes):
        node.meta["number"] = number
    return graph


def told(graph: fx.Graph) -> list[object]:
    rows: list[object] = []
    for node in graph.nodes:
        users, inputs = [user.name for user in node.users], [source.name for source in node.all_input_nodes]
        rows.append((node.op, node.target, node.name, str(node.args), str(node.kwargs), users, inputs, node.meta))
    return rows


def test_a_copy_is_what_torch_copies() -> None:
    source, ours, theirs = example(), fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned, expected = copy_nodes(ours, source, copies), theirs.graph_copy(source, {})
    assert str(returned) == str(expected) and told(ours) == told(theirs)
    assert ours.find_nodes(op="call_function", target=torch.add) == [
        copies[node] for node in source.nodes if node.name == "add"
    ]
    for graph, results in ((ours, returned), (theirs, expected)):
        graph.output(results)
        graph.lint()
    assert told(ours) == told(theirs)


def test_what_is_copied_already_stays() -> None:
    source, graph = example(), fx.Graph()
    copies = {node: graph.placeholder(f"given_{node.name}") for node in source.nodes if node.name in ("x", "add")}
    copies[next(node for node in source.nodes if node.name == "y")] = graph.placeholder("y")
    copy_nodes(graph, source, copies)
    assert [node.name for node in graph.nodes] == ["given_x", "given_add", "y", "split", "getitem"]
    graph.lint()


def test_metadata_of_a_copy_is_its_own() -> None:
    source, graph = example(), fx.Graph()
    x = next(iter(source.nodes))
    made = copy_node(graph, x, {})
    made.meta["more"] = 1
    assert "more" not in x.meta and made.meta["number"] == 0


def test_a_node_is_as_create_node_makes_it() -> None:
    ours, theirs = fx.Graph(), fx.Graph()
    for graph, make in ((ours, lambda *given: new_node(ours, *given)), (theirs, theirs.create_node)):
        x = graph.placeholder("x")
        for name in (None, "twice", None):
            make("call_function", torch.add, (x, x), {"alpha": 3}, name)
        make("call_method", "sin", (x,), {})
        make("call_function", torch.rand, (), {})
    assert told(ours) == told(theirs)
