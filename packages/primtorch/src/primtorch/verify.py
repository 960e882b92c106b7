"""The proof that a graph is closed under an opset."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from primtorch.decompose import WHOLE_IN_PART, Opset, decompositions
from primtorch.decompose.core_aten import SPELLINGS
from primtorch.decompose.devices import devices_of
from primtorch.errors import NotClosed
from primtorch.higher_order import HigherOrder
from primtorch.lower import SIZE_FUNCTIONS
from primtorch.prims import PRIMS, Prim

_OPS = frozenset({"placeholder", "get_attr", "call_function", "output"})


def verify(gm: fx.GraphModule, opset: Opset = "prims", preserve: Sequence[OpOverload] = ()) -> None:
    """Check that every node belongs to `opset` (or `preserve`, or computes sizes, or calls an operator that no rule
    brings there or one over such graphs) and says what it gives, and that no prim has operands on two devices.

    Raises:
        NotClosed: names the first node that does not, with the user's frames.
    """
    bodies: dict[int, fx.GraphModule] = {}
    for node in gm.graph.nodes:
        reason = _reason(node, opset, preserve)
        if reason is not None:
            raise NotClosed(str(node.target), reason, node.name, node.meta.get("stack", ()))
        if isinstance(node.target, HigherOrder):
            bodies.update((id(body), body) for body in node.target.bodies)  # type: ignore[misc]
    for body in bodies.values():
        verify(body, opset, preserve)


def _reason(node: fx.Node, opset: Opset, preserve: Sequence[OpOverload]) -> str | None:
    if node.op not in _OPS:
        return f"a {node.op} node has no place in a graph of {opset}"
    if node.op != "call_function":
        return None
    if "val" not in node.meta:
        return "the node has no meta['val']"
    target = node.target
    if target is operator.getitem or target in SIZE_FUNCTIONS or target in preserve:
        return None
    if isinstance(target, HigherOrder):
        graphs = all(isinstance(body, fx.GraphModule) for body in target.bodies)
        return None if graphs else "has a body that is no graph"
    if isinstance(target, Prim):
        return _wrong_prim(node, target)
    if not isinstance(target, OpOverload):
        return f"is not in the opset {opset!r}"
    if target._schema.is_mutable:
        return "writes to its arguments, and the graph is to be functional"
    if opset == "core_aten" and (torch.Tag.core in target.tags or target in SPELLINGS):
        return None
    if target in WHOLE_IN_PART or target not in decompositions(opset):
        return None  # a call of itself
    return "is not core ATen" if opset == "core_aten" else f"is not in the opset {opset!r}"


def _wrong_prim(node: fx.Node, prim: Prim) -> str | None:
    if PRIMS.get(prim.name) is not prim:
        return "is not the prim of that name"
    if prim.aten is None:  # what an ATen overload does with two devices is the overload's business
        places = {d for operand in node.all_input_nodes for d in devices_of(operand.meta.get("val"))}
        if len(places) > 1:
            return f"its operands are on {' and '.join(sorted(map(str, places)))}"
    return None
