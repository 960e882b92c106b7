"""Brings a joint graph into a smaller set of operators."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch._ops import OpOverload

from aotautograd.passes import output_values
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
    gradients = len(output_values(joint.module.graph)) - joint.num_forward_outputs
    fresh = [*(returned.kind == "value" for returned in joint.metadata.forward_outputs), *[True] * gradients]
    lowered = lower(joint.module, opset, preserve, fresh=fresh)
    verify(lowered, opset, preserve)
    made_by(lowered, f"lower to {opset}", joint.module)
    if dump is not None:
        dump(f"{opset}.py", graph_text(lowered, opset))
    return replace(joint, module=lowered)


@functools.cache
def drawing_operators(opset: Opset) -> tuple[OpOverload, ...]:
    """The operators that draw random numbers and that the opset would express by its own generator."""
    return tuple(op for op in decompositions(opset) if torch.Tag.nondeterministic_seeded in op.tags)
