"""Operators that are not torch's own: opaque calls of themselves, in forward and backward, with all their effects."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from operator_programs import CALLS, Program, draw_program

import torchcompile

BACKENDS = ("inductor", "aot_eager", "eager")


@pytest.fixture(autouse=True)
def forget() -> None:
    torchcompile.reset()


def inputs_of(program: Program, rows: int = 3, grad: bool = False) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(rows)
    return [
        torch.randn(rows, 4, dtype=torch.float64, generator=made).requires_grad_(grad) for _ in range(program.inputs)
    ]


def run(function: Any, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    """Results, inputs afterwards, gradients, how often each kernel ran."""
    CALLS.clear()
    results = function(*inputs)
    differentiable = [r for r in results if r.requires_grad]
    if differentiable:
        sum(((i + 1) * r.sin().sum() for i, r in enumerate(differentiable)), torch.zeros(())).backward()
    gradients = [x.grad for x in inputs]
    return [r.detach() for r in results], [x.detach() for x in inputs], gradients, dict(CALLS)


def assert_one_graph() -> None:
    report = torchcompile.report()
    assert report.captured == 1 and not report.breaks and not report.fallbacks, str(report)


@pytest.mark.parametrize("mode", ["inference", "training", "writes", "writes to inputs", "dynamic"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_with_random_schemas(backend: str, mode: str) -> None:
    for _ in range(6):
        seed = random.randrange(10**9)
        rng = random.Random(seed)
        program = draw_program(rng, writes=mode not in ("training",), in_place=mode == "writes to inputs")
        grad = mode == "training"
        torchcompile.reset()
        compiled = torchcompile.compile(
            program.__call__, backend=backend, fullgraph=True, dynamic=True if mode == "dynamic" else None
        )
        for rows in (3, 5, 8) if mode == "dynamic" else (3, 3):
            wanted = run(program, inputs_of(program, rows, grad))
            got = run(compiled, inputs_of(program, rows, grad))
            what = f"seed {seed}: {[call.operator.schema() for call in program.calls]}"
            torch.testing.assert_close(got[:3], wanted[:3], msg=lambda text, what=what: f"{what}\n{text}")
            assert got[3] == wanted[3], what
        assert_one_graph()
