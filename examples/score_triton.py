"""The Triton kernels of examples/score.py, on a machine with or without a GPU."""

import torchdynamo
from aotautograd import aot_module, min_cut
from score import inputs, score
from torchinductor import generate_source


def show(graph, example_inputs):
    """A compiler that prints the kernels for a CUDA device, and runs the graph as it is."""
    for name, text in generate_source(graph, "cuda").items():
        print(f"# kernel {name}\n{text}")
    return graph.forward


captured = torchdynamo.export(score)(*inputs()).graph
aot_module(captured, inputs(), fw_compiler=show, partitioner=min_cut(), decompositions="prims")
