"""What a process keeps of a traced program so that another one can run what was compiled of it, without a trace."""

from __future__ import annotations

import torch
from torch import fx

from aotautograd.schemas import JointGraph, Outline, Partition, SavedReport
from primtorch.spec import TensorSpec


def outline_of(joint: JointGraph, parts: Partition | None, reads: frozenset[int]) -> Outline | None:
    """The outline of a program; None where it has more to say than an outline holds: sizes that are symbols, numbers
    that were taken out of tensors, derivatives that raise."""
    if joint.guard is not None or joint.failing or joint.metadata.assumptions:
        return None
    if parts is None:
        placeholders = _placeholders(joint.module)
        return None if placeholders is None else Outline(joint.metadata, forward=placeholders)
    forward, backward = _placeholders(parts.forward), _placeholders(parts.backward)
    if forward is None or backward is None or parts.num_saved_symbols:
        return None
    saved = tuple(value.name if value.op == "placeholder" else "" for value in parts.saved_values)
    return Outline(joint.metadata, reads, forward, backward, parts.saved_names, saved)


def _placeholders(module: fx.GraphModule) -> tuple[tuple[str, TensorSpec], ...] | None:
    found = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, (torch.Tensor, TensorSpec)):
            return None
        spec = TensorSpec.of(value) if isinstance(value, torch.Tensor) else value
        if any(isinstance(size, torch.SymInt) for size in (*spec.shape, *spec.strides, spec.offset)):
            return None
        found.append((node.name, spec))
    return tuple(found)


def partition_of(outline: Outline) -> Partition:
    """The two halves as the run time reads them: what they take, and which inputs are kept as they are."""
    forward, backward = fx.Graph(), fx.Graph()
    taken = {name: _placeholder(forward, name, spec) for name, spec in outline.forward}
    computed = forward.call_function(torch.empty, (0,)) if "" in outline.saved else None
    forward.output(tuple(taken.get(name, computed) for name in outline.saved))
    for name, spec in outline.backward:
        _placeholder(backward, name, spec)
    backward.output(())
    return Partition(
        fx.GraphModule({}, forward),
        fx.GraphModule({}, backward),
        len(outline.saved),
        0,
        SavedReport(len(outline.saved), 0, 0, 0, 0),
        outline.saved_names,
        outline.metadata,
    )


def _placeholder(graph: fx.Graph, name: str, spec: TensorSpec) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = spec
    return node
