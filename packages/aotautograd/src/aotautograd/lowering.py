"""Brings a joint graph into a smaller set of operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch._ops import OpOverload

from aotautograd.passes import output_node, output_values
from aotautograd.schemas import Dump, JointGraph, Opset
from primtorch import graph_text
from primtorch.builder import nowhere
from primtorch.decompose import decompositions
from primtorch.frozen import record
from primtorch.lower import lower
from primtorch.printing import made_by
from primtorch.verify import verify


@record
class Lowering:
    """How graphs of ATen operators are brought into a smaller set.

    Attributes:
        opset, walks_windows: see `primtorch.lower`.
        preserve: operators that stay whole, those that draw random numbers among them where the numbers are eager's.
    """

    opset: Opset
    preserve: tuple[OpOverload, ...] = ()
    walks_windows: Callable[[torch.device], bool] = nowhere

    def of(self, module: fx.GraphModule, fresh: Sequence[bool]) -> fx.GraphModule:
        """The graph in the set. `fresh`: see `primtorch.lower`."""
        return lower(module, self.opset, self.preserve, fresh=fresh, walks_windows=self.walks_windows)

    def verify(self, module: fx.GraphModule) -> None:
        """Raises NotClosed where a graph has operators that are not of the set."""
        verify(module, self.opset, self.preserve)


def lower_joint(joint: JointGraph, lowering: Lowering, dump: Dump | None = None) -> JointGraph:
    """The same joint graph in prims or core ATen. Every node keeps its phase.

    What is returned stays memory of its own: copies that the program made of its inputs, results that it computed
    twice, gradients. A new value of an input may share memory with a result, as it is written to the input.
    """
    opset, lowered = lowering.opset, lowering.of(joint.module, _fresh(joint))
    lowering.verify(lowered)
    made_by(lowered, f"lower to {opset}", joint.module)
    if dump is not None:
        dump(f"{opset}.py", graph_text(lowered, opset))
    return replace(joint, module=lowered)


def lowered_values(joint: JointGraph, nodes: Sequence[fx.Node], lowering: Lowering) -> fx.GraphModule:
    """A graph that returns what these nodes of a joint graph are in `lower_joint`'s, and has the names of that."""
    output, returned = output_node(joint.module.graph), output_values(joint.module.graph)
    output.args = ((*returned, *nodes),)
    try:
        lowered = lowering.of(joint.module, _fresh(joint))
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
