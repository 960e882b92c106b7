"""What programs become on a GPU: how many kernels, the bytes that these move, their values in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_cases import CASES, MANY
from torch.utils import _pytree as pytree

import primtorch
from torchinductor.cost import traffic_of
from torchinductor.source import planned_operations

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parent


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
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "device_worker.py", *names],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["case"] for r in replies] == names
    for reply in replies:
        assert "failure" not in reply, reply["failure"]
        rounding = torch.finfo(CASES[reply["case"]].dtype).eps
        assert reply["error"] <= 2 * reply["eager"] + rounding / 4, reply
