"""Whose memory a node's value lies in: views, of ATen and of the prims, are chains of nodes on what they look at."""

from __future__ import annotations

import operator
from functools import lru_cache

import torch
from torch import fx
from torch._ops import OpOverload

from primtorch.prims import Prim

# Views whose schema does not say so.
_UNANNOUNCED = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.lift.default})


def is_view(target: object) -> bool:
    """Whether an operator's result may share memory with its first argument."""
    if isinstance(target, Prim):
        return "view" in target.tags
    return returns_alias(target) or target in _UNANNOUNCED


def returns_alias(target: object) -> bool:
    """Whether an operator's schema says that a result lies in the memory of an argument."""
    return isinstance(target, OpOverload) and _says_alias(target)


@lru_cache(maxsize=4096)
def _says_alias(target: OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


def viewed(node: fx.Node) -> fx.Node | None:
    """The node that this one is a view of (for an item of a list of views, the list), or None."""
    if node.op != "call_function":
        return None
    args = node.args
    source = args[0] if args else None
    if not isinstance(source, fx.Node):
        return None
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
