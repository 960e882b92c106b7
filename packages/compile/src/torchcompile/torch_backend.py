"""This stack as a back end of torch.compile: `torch.compile(model, backend="torchcompile")`, found by entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from torchcompile.api import compile
from torchcompile.passes import plain_graph


def torchcompile_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Compiles a graph that torch.compile captured. It is captured once more, when it first runs, so that sizes, guards
    and gradients are this stack's own. Its sizes are symbols where the graph has symbols.
    """
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    symbolic = any(isinstance(one, torch.SymInt) for one in (*inputs, *example_inputs))
    return compile(plain_graph(gm).forward, dynamic=symbolic or None, mode=mode, options=options)
