"""Builds graphs of prims for tests: `build(fn, *examples)` runs `fn(P, *values)` with P.<prim>(...) recording a node."""

import operator

import torch
import torch.utils._pytree as pytree
from torch import fx

from primtorch import prims
from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv

CPU = torch.device("cpu")


class Value:
    def __init__(self, node, spec):
        self.node, self.spec = node, spec

    @property
    def shape(self):
        return self.spec.shape

    @property
    def dtype(self):
        return self.spec.dtype


class Recorder:
    def __init__(self, graph):
        self.graph = graph

    def __getattr__(self, name):
        prim = getattr(prims, name)

        def call(*args, **kwargs):
            nodes = pytree.tree_map(lambda x: x.node if isinstance(x, Value) else x, (args, kwargs))
            specs = pytree.tree_map(lambda x: x.spec if isinstance(x, Value) else x, (args, kwargs))
            node = self.graph.call_function(prim, *nodes)
            node.meta["val"] = result = prim.meta(*specs[0], **specs[1])
            if not isinstance(result, tuple):
                return Value(node, result)
            parts = []
            for i, spec in enumerate(result):
                part = self.graph.call_function(operator.getitem, (node, i))
                part.meta["val"] = spec
                parts.append(Value(part, spec))
            return tuple(parts)

        return call


def build(fn, *examples):
    """A GraphModule of prims with the examples' metadata as inputs."""
    graph = fx.Graph()
    values = []
    for i, example in enumerate(examples):
        node = graph.placeholder(f"a{i}")
        node.meta["val"] = example if isinstance(example, TensorSpec) else TensorSpec.of(example)
        values.append(Value(node, node.meta["val"]))
    out = fn(Recorder(graph), *values)
    graph.output(tuple(v.node for v in (out if isinstance(out, tuple) else (out,))))
    return fx.GraphModule(torch.nn.Module(), graph)


def symbolic(fn, hints, specs):
    """A graph whose symbols are int placeholders; `specs(*symbols)` gives the tensor inputs' (shape, dtype)."""
    env = ShapeEnv()
    graph = fx.Graph()
    symbols = []
    for k, hint in enumerate(hints):
        node = graph.placeholder(f"s{k}")
        node.meta["val"] = env.symbol(hint, f"size{k}")
        symbols.append(Value(node, node.meta["val"]))
    values = []
    for k, (shape, dtype) in enumerate(specs(*[s.spec for s in symbols])):
        node = graph.placeholder(f"a{k}")
        strides, step = [], 1
        for size in reversed(shape):
            strides.insert(0, step)
            step = step * size
        node.meta["val"] = TensorSpec(tuple(shape), tuple(strides), dtype, CPU)
        values.append(Value(node, node.meta["val"]))
    out = fn(Recorder(graph), *[s.spec for s in symbols], *values)
    graph.output(tuple(v.node for v in (out if isinstance(out, tuple) else (out,))))
    return fx.GraphModule(torch.nn.Module(), graph)
