"""A compiler that compiles nothing: each operator of the graph runs as PyTorch has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from aotautograd.in_place import accumulate_in_place
from aotautograd.schemas import Compiled

aten = torch.ops.aten


class BoxedGraph:
    """Runs a graph on a list of its inputs, which it empties: each value is freed after its last use, and sums are
    written over operands that are not read again."""

    _boxed_call = True

    def __init__(self, module: fx.GraphModule) -> None:
        graph = fx.Graph()
        results = graph.graph_copy(module.graph, {})
        graph.output(results)
        for zeros in graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default):
            zeros.target = aten.zeros.default  # which may be written: the others, and products with them, may not
        accumulate_in_place(graph)
        graph.set_codegen(_BoxedCodeGen())
        self.run = fx.GraphModule(module, graph, module.__class__.__name__).forward
        self.default_dtype = torch.get_default_dtype()

    def __call__(self, inputs: list[object]) -> Sequence[object]:
        """Casts are nodes of the graph, and its operators take no other dtype than where it was traced: a backward may
        run under any."""
        dtype = torch.get_default_dtype()
        if dtype is not self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        try:
            with torch._C._DisableAutocast():
                results: Sequence[object] = self.run(inputs)
        finally:
            if dtype is not self.default_dtype:
                torch.set_default_dtype(dtype)
        return results


def run_graph(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Compiled:
    """The graph as it is, run by PyTorch's kernels: a forward, backward or inference compiler."""
    return BoxedGraph(gm)
