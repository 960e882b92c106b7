"""Which environment the symbols of a graph are of."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from primtorch.spec import TensorSpec
from primtorch.symbolic import ShapeEnv, shape_env_of


def environment_of(program: fx.GraphModule) -> ShapeEnv | None:
    """That of the symbols in a graph: of the numbers that it takes, and of sizes that depend on data."""
    for node in program.graph.nodes:
        known = node.meta.get("val")
        for value in (known,) if type(known) is TensorSpec else tree_leaves(known):
            sizes = value.shape if isinstance(value, (torch.Tensor, TensorSpec)) else (value,)
            for size in sizes:
                if type(size) is not int and isinstance(size, (torch.SymInt, torch.SymFloat)):
                    return shape_env_of(size)
    return None
