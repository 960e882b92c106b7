"""A back end on torchdynamo alone: it gets a graph of torch calls and gives a callable."""

from collections import Counter

import torch

import torchdynamo
from primtorch import graph_text

calls: Counter[str] = Counter()


def counting_backend(graph, example_inputs):
    """Runs each node with PyTorch, and counts what it ran."""
    print(graph_text(graph))

    class Count(torch.fx.Interpreter):
        def run_node(self, node):
            if node.op.startswith("call"):
                calls[node.name] += 1
            return super().run_node(node)

    return Count(graph).run


@torchdynamo.optimize(counting_backend)
def normalise(x, eps=1e-6):
    shifted = x - x.mean(-1, keepdim=True)
    return shifted / (shifted.std(-1, keepdim=True) + eps)


x = torch.randn(4, 8)
torch.testing.assert_close(normalise(x), (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6))
normalise(torch.randn(4, 8))  # the guards hold: nothing is captured again
assert set(calls.values()) == {2}, calls
