"""A result that eager keeps for its backward is kept once, as the caller gets it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from aotautograd import min_cut, trace_joint
from aotautograd.api import partition
from aotautograd.lowering import Lowering, lower_joint
from aotautograd.passes import output_values, simplify
from aotautograd.returned import read_returned_copies

Tensor = torch.Tensor
PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "softmax": (lambda x: x.softmax(3), True),  # by rows, whatever the image's order
    "softmax of channels": (lambda x: x.softmax(1), True),
    "sigmoid": (lambda x: x.sigmoid(), True),
    "exp": (lambda x: x.exp(), True),
    "softmax, doubled": (lambda x: x.softmax(3) * 2, False),  # the caller may overwrite what eager does not keep
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_caller_gets_is_what_is_kept(name: str) -> None:
    program, shared = PROGRAMS[name]
    x = torch.randn(2, 4, 6, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    joint = trace_joint(lambda x: (program(x),), [x])
    lowered = lower_joint(simplify(joint), Lowering("prims"))
    read_returned_copies(lowered)
    parts = partition(simplify(lowered), min_cut())
    result, *kept = output_values(parts.forward.graph)
    assert isinstance(result, fx.Node)
    own = [value for value in kept if isinstance(value, fx.Node) and value.op != "placeholder"]
    assert (result in own) == shared, parts.forward.code
    assert len(own) <= 1, "it is kept twice"
