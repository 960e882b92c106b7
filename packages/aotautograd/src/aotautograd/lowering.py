"""Brings a joint graph into a smaller set of operators."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx
from torch._ops import OpOverload

from aotautograd.passes import output_node, output_values
from aotautograd.schemas import Dump, JointGraph, Opset
from primtorch import graph_text
from primtorch.decompose import decompositions
from primtorch.lower import lower
from primtorch.printing import made_by
from primtorch.verify import verify


def lower_joint(
    joint: JointGraph,
    opset: Opset,
    dump: Dump | None = None,
    *,
    eager_random: bool = False,
    preserve: Sequence[OpOverload] = (),
) -> JointGraph:
    """The same joint graph in prims or core ATen. Every node keeps its phase.

    What is returned stays memory of its own: copies that the program made of its inputs, results that it computed
    twice, gradients. A new value of an input may share memory with a result, as it is written to the input.

    With `eager_random` the operators that draw numbers stay ATen's own, and so do their numbers. Those in `preserve`
    stay whole, too.
    """
    preserve = (*preserve, *(drawing_operators(opset) if eager_random else ()))
    lowered = lower(joint.module, opset, preserve, fresh=_fresh(joint))
    verify(lowered, opset, preserve)
    made_by(lowered, f"lower to {opset}", joint.module)
    if dump is not None:
        dump(f"{opset}.py", graph_text(lowered, opset))
    return replace(joint, module=lowered)


def lowered_values(
    joint: JointGraph,
    nodes: Sequence[fx.Node],
    opset: Opset,
    *,
    eager_random: bool = False,
    preserve: Sequence[OpOverload] = (),
) -> fx.GraphModule:
    """A graph that returns what these nodes of a joint graph are in `lower_joint`'s, and has the names of that."""
    preserve = (*preserve, *(drawing_operators(opset) if eager_random else ()))
    output, returned = output_node(joint.module.graph), output_values(joint.module.graph)
    output.args = ((*returned, *nodes),)
    try:
        lowered = lower(joint.module, opset, preserve, fresh=_fresh(joint))
    finally:
        output.args = (returned,)
    output_node(lowered.graph).args = (output_values(lowered.graph)[len(returned) :],)
    return lowered


def _fresh(joint: JointGraph) -> list[bool]:
    gradients = len(output_values(joint.module.graph)) - joint.num_forward_outputs
    return [*(returned.kind == "value" for returned in joint.metadata.forward_outputs), *[True] * gradients]


@functools.cache
def drawing_operators(opset: Opset) -> tuple[OpOverload, ...]:
    """The operators that draw random numbers and that the opset would express by its own generator."""
    return tuple(op for op in decompositions(opset) if torch.Tag.nondeterministic_seeded in op.tags)
