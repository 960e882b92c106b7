"""Rewrites of a captured graph before it is differentiated: same values, better kernels."""

from __future__ import annotations

import torch
from torch import fx


def dense_attention_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Makes attention masks dense along their last dimension.

    ATen's fused attention on CUDA refuses a mask whose last stride is not 1. A mask that is broadcast along it
    (an all-true padding mask, say) would send the call to the kernel that writes out the whole attention matrix.
    """
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention):
        mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        value = mask.meta.get("val") if isinstance(mask, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.device.type != "cuda" or value.stride(-1) == 1:
            continue
        assert isinstance(mask, fx.Node)
        with gm.graph.inserting_before(node):
            dense = gm.graph.call_method("contiguous", (mask,))
        dense.meta = {**mask.meta, "val": value.contiguous()}
        node.replace_input_with(mask, dense)
        changed = True
    if changed:
        gm.recompile()
    return gm


def plain_graph(gm: fx.GraphModule, with_facts: bool = False) -> fx.GraphModule:
    """A copy, for another compiler without the facts that this one's capture has noted at the nodes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes if not with_facts else ():
        node.meta.clear()
    return fx.GraphModule(gm, graph)
