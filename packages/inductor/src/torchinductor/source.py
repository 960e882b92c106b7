"""The kernels of a graph as source text, for a device that need not be there."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

from primtorch.spec import TensorSpec
from torchinductor.codegen.base import bundle_key, generated, legalized, takes, traits_of
from torchinductor.ir import Bundle, Kernel, Template
from torchinductor.lowering.context import Operation
from torchinductor.lowering.graph import lower_graph
from torchinductor.scheduling.bundles import bundle
from torchinductor.scheduling.schedule import schedule
from torchinductor.schemas import InductorOptions


def generate_source(
    gm: fx.GraphModule, device: torch.device | str | None = None, options: InductorOptions | None = None
) -> dict[str, str]:
    """Source of each kernel that a graph of prims becomes, by the kernels' names, in the order in which they run.

    Nothing is built or run, so this works for "cuda" on a machine without a GPU. With `device`, the graph is taken as
    if all of its tensors were there.

    Raises:
        LoweringError: a node has no rule.
        UnknownDevice: the device has no code generation back end.
    """
    options = options or InductorOptions()
    planned = planned_operations(gm, device, options)
    return {o.name: generated(o, options).text for o in planned if isinstance(o, (Kernel, Template, Bundle))}


def planned_operations(
    gm: fx.GraphModule, device: torch.device | str | None = None, options: InductorOptions | None = None
) -> list[Operation]:
    """What a graph of prims becomes, in the order in which it runs: kernels as their device's back end plans them, and
    calls. Raises what `generate_source` does."""
    options = options or InductorOptions()
    moved = gm if device is None else on_device(gm, torch.device(device))
    lowered = lower_graph(moved, options, takes, traits_of=traits_of)
    planned: list[Operation] = []
    for operation in schedule(lowered, options, traits_of):
        planned += legalized(operation, options) if isinstance(operation, (Kernel, Template)) else [operation]
    return bundle(lowered, planned, bundle_key) if options.fuse else planned


def on_device(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of the graph whose values, and device arguments, say `device`."""
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in gm.graph.nodes:
        made = nodes[node] = graph.node_copy(node, nodes.__getitem__)
        made.meta = {**node.meta, "val": _moved(node.meta.get("val"), device)}
        if node.op == "call_function":
            made.args = cast("tuple[Argument, ...]", _replaced(made.args, device))
            made.kwargs = {name: cast("Argument", _replaced(value, device)) for name, value in made.kwargs.items()}
    return fx.GraphModule(copy.copy(gm), graph)


def _moved(value: object, device: torch.device) -> object:
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, torch.Tensor):
        value = TensorSpec.of(value)
    return replace(value, device=device) if isinstance(value, TensorSpec) else value


def _replaced(value: object, device: torch.device) -> object:
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(item, device) for item in value)
    return device if isinstance(value, torch.device) else value
