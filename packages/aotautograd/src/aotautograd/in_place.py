"""Sums that are written over an operand that nobody reads again, as autograd does where gradients meet."""

from __future__ import annotations

import operator

import torch
from torch import fx

from aotautograd.passes import output_values, same_layout
from primtorch.memory import is_view, returns_alias

aten = torch.ops.aten


def accumulate_in_place(graph: fx.Graph) -> int:
    """Turns `a + b` into `a += b` where a's memory was made in the graph and is not read later; returns how often.

    For a graph that is run without autograd. What the graph returns is no operand of such a sum.
    """
    owners = _owners(graph)
    last = _last_uses(graph, owners)
    changed = 0
    for position, node in enumerate(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or owners[node] is None:
            continue  # where another value may be its memory, nobody knows when the sum is read last
        a, b = node.args
        for target, other in ((a, b), (b, a)):
            owner = owners.get(target) if isinstance(target, fx.Node) else None
            if owner is None or last[owner] > position or not same_layout(node, target):
                continue
            if isinstance(other, fx.Node) and owners.get(other) in (None, owner) and not _is_given(other):
                continue  # it may be a part of the same memory
            node.target, node.args = aten.add_.Tensor, (target, other)
            last[owner] = max(last[owner], last.pop(node))
            owners.update((n, owner) for n, o in owners.items() if o is node)
            changed += 1
            break
    return changed


def _is_given(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _owners(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """The node that made the memory which a node's value lies in; None where another may have made it."""
    owners: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if node.op != "call_function":
            owners[node] = None
        elif node.target is operator.getitem:
            assert source is not None
            owners[node] = node if owners[source] is source and not returns_alias(source.target) else owners[source]
        elif is_view(node.target):
            owners[node] = owners[source] if source is not None else None
        elif _makes_memory(node.target):
            owners[node] = node
        else:  # its value may be any of its operands
            owners[node] = None
            shared = {owners[n] for n in node.all_input_nodes}
            owners.update((n, None) for n, owner in owners.items() if owner in shared)
    return owners


def _makes_memory(target: object) -> bool:
    """Whether an operator's results are memory of their own. Composite operators may return views unannounced."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def _last_uses(graph: fx.Graph, owners: dict[fx.Node, fx.Node | None]) -> dict[fx.Node, int]:
    """The position of the last node that reads each owner's memory."""
    last: dict[fx.Node, int] = {}
    returned = {owners.get(n) for n in output_values(graph) if isinstance(n, fx.Node)}
    for position, node in enumerate(graph.nodes):
        for n in (node, *node.all_input_nodes):
            owner = owners[n]
            if owner is not None:
                last[owner] = position
    return {owner: len(graph.nodes) if owner in returned else position for owner, position in last.items()}
