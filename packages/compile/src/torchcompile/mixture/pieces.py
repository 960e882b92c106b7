"""The graph of one piece: sizes first, then tensors, as every graph that a back end of this stack is given."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from primtorch.printing import made_by
from primtorch.symbolic import expr_of
from torchcompile.mixture.placement import Piece, is_number


@dataclass(frozen=True, slots=True)
class Part:
    """A piece as a graph of its own.

    Attributes:
        takes: nodes of the whole graph whose values it is given, in order.
        gives: nodes of the whole graph whose values it returns, in order.
    """

    module: fx.GraphModule
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


def name_sizes(graph: fx.Graph) -> None:
    """Makes nodes of the sizes that only a tensor of the graph has, so that what reads it can be told of them."""
    known = {symbol for node in graph.nodes if is_number(node) for symbol in _own_symbol(node)}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if is_number(node) or not hasattr(value, "shape"):
            continue
        for dim, size in enumerate(value.shape):
            symbol = str(expr_of(size)) if isinstance(size, torch.SymInt) else None
            if symbol is None or symbol in known or expr_of(size).symbols() != {symbol}:
                continue
            with graph.inserting_after(node):
                read = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
            read.meta = {"val": size, "stack": node.meta.get("stack", ())}
            known.add(symbol)


def part_of(gm: fx.GraphModule, piece: Piece, known: Collection[fx.Node]) -> Part:
    """The graph of a piece of `gm`. `known`: the numbers that are there when it runs."""
    members = set(piece.nodes)
    read = dict.fromkeys(n for node in piece.nodes for n in node.all_input_nodes if n not in members)
    numbers = dict.fromkeys(n for n in read if is_number(n))
    if any(map(_is_symbolic, (*piece.nodes, *read))):
        numbers = dict.fromkeys((*_naming_sizes(piece, known), *numbers))
    tensors = [n for n in read if not is_number(n) and n.op != "get_attr"]
    takes = (*numbers, *tensors)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in (*(n for n in read if n.op == "get_attr"), *piece.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    gives = tuple(n for n in piece.nodes if any(user not in members for user in n.users))
    graph.output(tuple(copies[node] for node in gives))
    module = fx.GraphModule(gm, graph, "Piece")
    made_by(module, "cut into pieces", gm)
    return Part(module, takes, gives)


def _naming_sizes(piece: Piece, known: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The numbers by which the sizes in a piece are said: those that the graph is given, and what others came to."""
    nodes = {n for node in piece.nodes for n in (node, *node.all_input_nodes)}
    needed = {symbol for node in nodes for symbol in _symbols(node)}
    for node in known:
        if node.op == "placeholder" or needed & set(_own_symbol(node)):
            yield node


def _own_symbol(node: fx.Node) -> Sequence[str]:
    """The symbol that a number is by itself."""
    value = node.meta["val"]
    if not isinstance(value, torch.SymInt):
        return ()
    text = str(expr_of(value))
    return (text,) if expr_of(value).symbols() == {text} else ()


def _symbols(node: fx.Node) -> Iterator[str]:
    for value in pytree.tree_leaves(node.meta.get("val")):
        sizes = (*value.shape, *value.stride()) if hasattr(value, "shape") else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                yield from expr_of(size).symbols()


def _is_symbolic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (torch.SymInt, torch.SymFloat)) or any(True for _ in _symbols(node))
