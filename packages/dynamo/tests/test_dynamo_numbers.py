"""A sweep over values of an int or a float costs two compilations, and gives eager's result bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import number_programs
import pytest
import torch

import torchdynamo

FLOAT_VALUES = (0.5, 1.5, 2.25, 3.7, 4.01, 0.5, 5.5)
INT_VALUES = (1, 2, 3, 4, 2)


def versions(
    function: Any, calls: Iterable[tuple[Any, ...]], expected: Callable[..., Any], floats: bool = False, **options: Any
) -> int:
    """Runs the compiled function beside eager; how many graphs were compiled."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        assert floats or all(isinstance(i, (torch.Tensor, int, torch.SymInt)) for i in inputs)
        return gm.forward

    backend.takes_floats = floats  # type: ignore[attr-defined]
    chosen = torchdynamo.CaptureOptions(fullgraph=True, strict=True, **options)
    compiled = torchdynamo.optimize(backend, options=chosen)(function)
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), expected(*arguments), rtol=0, atol=0, equal_nan=True)
    return len(graphs)


@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize("name", number_programs.FLOATS)
def test_float_sweep(name: str, floats: bool) -> None:
    program = number_programs.FLOATS[name]
    assert versions(program, [(a,) for a in FLOAT_VALUES], program, floats) in (0, 2)


@pytest.mark.parametrize("name", number_programs.INTEGERS)
def test_integer_sweep(name: str) -> None:
    program = number_programs.INTEGERS[name]
    assert versions(program, [(n,) for n in INT_VALUES], program) == 2


@pytest.mark.parametrize("name", number_programs.ONE_A_VALUE)
def test_one_version_a_value(name: str) -> None:
    program = number_programs.ONE_A_VALUE[name]
    assert versions(program, [(n,) for n in INT_VALUES], program) <= 4
