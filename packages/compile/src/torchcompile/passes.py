"""Rewrites of a captured graph before it is differentiated: same values, better kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from primtorch.symbolic import expr_of
from torchcompile.known_values import Affine, Chosen, Condition, KnownValues, negated

_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def attention_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Leaves out what is known of attention's masks, and makes the others such as its fused kernels take."""
    if gm.graph.find_nodes(op="call_function", target=_ATTENTION):
        _leave_out_known(gm.graph)
        _make_dense(gm.graph)
        gm.recompile()
    return gm


def _leave_out_known(graph: fx.Graph) -> None:
    """A mask that is true everywhere, and the causal one, are not needed: there are kernels for these.

    Libraries leave them out as well in eager, where they may look at a mask's elements, but not in what is captured.
    """
    known = KnownValues(graph)
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        mask = _mask_of(node)
        if not isinstance(mask, fx.Node) or "val" not in mask.meta or _argument(node, 5, "is_causal", False):
            continue
        condition = _attended(known, mask)
        if condition is None:
            bare = _chosen_everywhere(known, mask)
            if bare is not None:
                with graph.inserting_before(node):
                    expanded = graph.call_method("expand_as", (bare, mask))
                expanded.meta = {**mask.meta, "val": bare.meta["val"].expand_as(mask.meta["val"])}
                _set_mask(node, expanded)
        elif not condition.sums:
            _set_mask(node, None)
        elif _is_causal(condition) and _of_one_length(node):
            _set_mask(node, None)
            node.args, node.kwargs = node.args[:5], {**node.kwargs, "is_causal": True}


def _argument(node: fx.Node, place: int, name: str, default: object) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _mask_of(node: fx.Node) -> Any:
    return _argument(node, 3, "attn_mask", None)


def _set_mask(node: fx.Node, mask: fx.Node | None) -> None:
    if len(node.args) > 3:
        node.args = (*node.args[:3], mask, *node.args[4:])
    else:
        node.kwargs = {**node.kwargs, "attn_mask": mask}


def _attended(known: KnownValues, mask: fx.Node) -> Condition | None:
    """Where elements take part, of a mask of booleans or one that is added."""
    value, dtype = known.of(mask), mask.meta["val"].dtype
    if isinstance(value, Condition):
        return value
    if isinstance(value, Affine) and value.constant and value.base == 0:
        return Condition((), len(value.slopes))
    if not isinstance(value, Chosen) or not dtype.is_floating_point:
        return None
    lowest = torch.finfo(dtype).min
    if value.inside == 0 and value.outside <= lowest:
        return value.where
    return negated(value.where) if value.outside == 0 and value.inside <= lowest else None


def _chosen_everywhere(known: KnownValues, mask: fx.Node) -> fx.Node | None:
    """Of a choice between biases and the lowest number by a condition that holds everywhere, the biases."""
    name, value = getattr(mask.target, "__name__", None), mask.meta["val"]
    if mask.op != "call_function" or name != "where" or len(mask.args) != 3 or mask.kwargs:
        return None
    condition, chosen = known.condition(mask.args[0]), mask.args[1]
    made = chosen.meta.get("val") if isinstance(chosen, fx.Node) else None
    if condition is None or condition.sums or not isinstance(made, torch.Tensor) or made.dtype != value.dtype:
        return None
    assert isinstance(chosen, fx.Node)
    return chosen if chosen not in known.written else None


def _is_causal(condition: Condition) -> bool:
    """Whether elements take part up to their own place: row less column is at least zero, of the last two dims."""
    return condition.rank >= 2 and condition.sums == (Affine(0, (*(0,) * (condition.rank - 2), 1, -1)),)


def _of_one_length(node: fx.Node) -> bool:
    """Whether there are as many queries as keys: else kernels differ in what is causal."""
    query, key = (_argument(node, place, name, None).meta["val"] for place, name in enumerate(("query", "key")))
    return expr_of(query.shape[-2]) == expr_of(key.shape[-2])


def _make_dense(graph: fx.Graph) -> None:
    """Makes attention masks dense along their last dimension.

    ATen's fused attention on CUDA refuses a mask whose last stride is not 1. A mask that is broadcast along it (one of
    queries alone, say) would send the call to the kernel that writes out the whole attention matrix.
    """
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        mask = _mask_of(node)
        value = mask.meta.get("val") if isinstance(mask, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.device.type != "cuda" or value.stride(-1) == 1:
            continue
        assert isinstance(mask, fx.Node)
        with graph.inserting_before(node):
            dense = graph.call_method("contiguous", (mask,))
        dense.meta = {**mask.meta, "val": value.contiguous()}
        _set_mask(node, dense)


def plain_graph(gm: fx.GraphModule, with_facts: bool = False) -> fx.GraphModule:
    """A copy, for another compiler without the facts that this one's capture has noted at the nodes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes if not with_facts else ():
        node.meta.clear()
    return fx.GraphModule(gm, graph)
