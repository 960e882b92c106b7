"""The min-cut partitioner: keeps the fewest bytes from which the backward can compute the rest cheaply."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from aotautograd.analysis import is_view
from aotautograd.max_flow import INFINITE, FlowNetwork
from aotautograd.partitioners import is_backward, is_symbol, is_tensor, mark_phases, nbytes, split, unsafe_inputs
from aotautograd.passes import has_effect, output_values
from aotautograd.schemas import JointGraph, Partition, Partitioner

aten = torch.ops.aten

# Prims by family (see primtorch.prims) and ATen operators by packet that cost about as much as reading their result.
_CHEAP_FAMILIES = frozenset({"elementwise", "comparison", "ternary", "conversion", "creation", "view", "shape"})
_CHEAP_PACKETS = frozenset(
    {
        aten._to_copy, aten.clone, aten.expand, aten.cat, aten.full, aten.full_like, aten.zeros, aten.zeros_like,
        aten.ones, aten.ones_like, aten.arange, aten.scalar_tensor, aten.constant_pad_nd, aten.copy, aten.where,
        aten.masked_fill, aten.tril, aten.triu, aten._unsafe_view, aten.empty, aten.empty_like, aten.repeat, aten.stack,
    }
)  # fmt: skip


def is_cheap(node: fx.Node) -> bool:
    """Pointwise operators, views, conversions and creation: to compute them again costs one pass over memory."""
    if node.op != "call_function":
        return node.op == "get_attr"
    if has_effect(node):
        return False
    target: object = node.target
    if target is operator.getitem or is_view(node):
        return True
    family = getattr(target, "family", None)
    if family is not None:
        return any(str(family).startswith(cheap) for cheap in _CHEAP_FAMILIES)
    return (
        torch.Tag.pointwise in getattr(target, "tags", ()) or getattr(target, "overloadpacket", None) in _CHEAP_PACKETS
    )


def min_cut(memory_budget: float = 1.0) -> Partitioner:
    """A partitioner that keeps a minimum of bytes.

    With `memory_budget` 1 only cheap operators are computed again. Below 1 it also recomputes costly ones (never random
    draws), the ones with the largest results first, until at most that part of the bytes is kept; 0 keeps only inputs
    and random values.
    """
    if not 0 <= memory_budget <= 1:
        raise ValueError(f"memory_budget is a fraction between 0 and 1, not {memory_budget}")

    def partitioner(joint: JointGraph) -> Partition:
        mark_phases(joint)
        values = _values_to_place(joint)
        costly = [n for n in values if not is_cheap(n) and n.op != "placeholder"]
        saved = _cut(joint, values, set(costly))
        limit = int(memory_budget * _kept_bytes(saved))
        if memory_budget < 1:
            costly.sort(key=_result_bytes, reverse=True)
            fixed = [n for n in costly if has_effect(n)]
            free = [n for n in costly if not has_effect(n)]
            low, high = 0, len(free)  # the fewest costly operators to compute again that meet the limit
            while low < high:
                middle = (low + high) // 2
                if _kept_bytes(_cut(joint, values, {*fixed, *free[middle:]})) <= limit:
                    high = middle
                else:
                    low = middle + 1
            saved = _cut(joint, values, {*fixed, *free[low:]})
        return split(joint, saved)

    partitioner.__name__ = f"min_cut({memory_budget:g})"
    return partitioner


def _values_to_place(joint: JointGraph) -> list[fx.Node]:
    """Forward nodes with tensor results (or tuples of them), in order."""
    return [n for n in joint.module.graph.nodes if n.op != "output" and not is_backward(n) and not is_symbol(n)]


def _kept_bytes(saved: Sequence[fx.Node]) -> int:
    return sum(nbytes(n) for n in saved if n.op != "placeholder")


def _result_bytes(node: fx.Node) -> int:
    if is_tensor(node):
        return nbytes(node)
    return sum(nbytes(u) for u in node.users if is_tensor(u) and u.target is operator.getitem)


def _cut(joint: JointGraph, values: Sequence[fx.Node], costly: set[fx.Node]) -> list[fx.Node]:
    """The nodes to keep. Each value is an edge whose capacity is its size; what the backward reads leads to the
    sink."""
    source, sink = 2 * len(values), 2 * len(values) + 1
    place = {n: 2 * i for i, n in enumerate(values)}
    network = FlowNetwork(2 * len(values) + 2)
    gradients = {n for n in output_values(joint.module.graph)[joint.num_forward_outputs :] if isinstance(n, fx.Node)}
    unsafe = unsafe_inputs(joint)
    for node, v in place.items():
        if node.op == "placeholder" and node not in unsafe:
            size = 1  # alive anyway
        elif is_tensor(node) and not is_view(node):
            size = 2 * nbytes(node) + 1
        else:
            size = INFINITE
        network.add(v, v + 1, size)
        if node.op == "placeholder" or node in costly:
            network.add(source, v, INFINITE)
        for user in node.users:
            if user in place:
                network.add(v + 1, place[user], INFINITE)
        if node in gradients or any(is_backward(u) and u.op != "output" for u in node.users):
            network.add(v + 1, sink, INFINITE)
    network.run(source, sink)
    side = network.sink_side(sink)
    return [n for n, v in place.items() if v not in side and v + 1 in side]
