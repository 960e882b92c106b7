"""Whose memory a node's value lies in: views, of ATen and of the prims, are chains of nodes on what they look at."""

from __future__ import annotations

import operator

import torch
from torch import fx

from primtorch.prims import Prim

# Views whose schema does not say so.
_UNANNOUNCED = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.lift.default})


def is_view(target: object) -> bool:
    """Whether an operator's result may share memory with its first argument."""
    if isinstance(target, Prim):
        return "view" in target.tags
    return target in _UNANNOUNCED or returns_alias(target)


def returns_alias(target: object) -> bool:
    """Whether an operator's schema says that a result lies in the memory of an argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def viewed(node: fx.Node) -> fx.Node | None:
    """The node that this one is a view of (for an item of a list of views, the list), or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    maker = source if node.target is operator.getitem else node
    return source if maker.op == "call_function" and is_view(maker.target) else None


def path_of_views(node: fx.Node) -> tuple[fx.Node, ...]:
    """From the node that made the memory to `node`, each a view of the one before it."""
    path = [node]
    while (source := viewed(path[-1])) is not None:
        path.append(source)
    return tuple(reversed(path))


def memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is, or is a view of."""
    while (source := viewed(node)) is not None:
        node = source
    return node
