"""What programs become on a GPU: how many kernels, the bytes that these move, their values in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from device_cases import CASES, MANY
from interpreted import replies
from torch.utils import _pytree as pytree

import primtorch
from torchinductor.cost import traffic_of
from torchinductor.source import planned_operations

pytest.importorskip("triton")


@pytest.mark.parametrize("name", CASES)
def test_kernels_and_the_bytes_that_they_move(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs(MANY)
    found = traffic_of(planned_operations(primtorch.lower(primtorch.trace(case.program, *inputs)), "cuda"))
    least = sum(t.numel() * t.element_size() for t in (*inputs, *pytree.tree_leaves(case.program(*inputs))))
    assert found.kernels == case.kernels
    assert found.moved <= case.moved * least


def test_values_in_the_interpreter() -> None:
    names = [name for name, case in CASES.items() if not case.slow]
    found = replies("device_worker.py", *names)
    assert [r["case"] for r in found] == names
    for reply in found:
        assert "failure" not in reply, reply["failure"]
        rounding = torch.finfo(CASES[reply["case"]].dtype).eps
        assert reply["error"] <= 2 * reply["eager"] + rounding / 4, reply
