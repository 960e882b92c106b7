"""`min` and `max` of tensors: chosen in the graph, unless the program could tell that the choice is an operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchcompile

Program = Callable[[torch.Tensor], torch.Tensor]


def of_two(x: torch.Tensor) -> torch.Tensor:
    return min(x[0, 0], x[0, 1]) + x


def of_a_list(x: torch.Tensor) -> torch.Tensor:
    return max([x.sum(), x.mean(), x[0, 0]]) * 2


def with_a_nan(x: torch.Tensor) -> torch.Tensor:
    nan = x[0, 0] * float("nan")
    return torch.stack([max(nan, x[0, 1]) * 1, max(x[0, 1], nan) * 1, min(nan, x[0, 1]) * 1])


def returned(x: torch.Tensor) -> torch.Tensor:
    return min(x[0, 0], x[0, 1])


def a_view_returned(x: torch.Tensor) -> torch.Tensor:
    return max(x[0, 0], x[0, 1]).view(1)


def operand_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    least = min(y[0, 0], y[0, 1])
    y.add_(1)
    return least * 2


def choice_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    min(y[0, 0], y[0, 1]).add_(1)
    return y


def with_a_number(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + max(x[0, 0], float("-inf"))


WHOLE = (of_two, of_a_list, with_a_nan)
BROKEN = (returned, a_view_returned, operand_written, choice_written, with_a_number)


@pytest.mark.expected_eager("data_dependent_branch", "overlapping_inputs")
@pytest.mark.parametrize("program", (*WHOLE, *BROKEN), ids=lambda program: program.__name__)
def test_choices_are_eagers(program: Program) -> None:
    compiled = torchcompile.compile(program, backend="aot_eager")
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        found, wanted = compiled(x), program(x)
        torch.testing.assert_close(found, wanted, equal_nan=True)
        gradients: list[Any] = [torch.autograd.grad(out.sum(), x, allow_unused=True)[0] for out in (found, wanted)]
        torch.testing.assert_close(*gradients, equal_nan=True)
        assert (found._base is x) is (wanted._base is x)
    broke = any(event.kind.id == "data_dependent_branch" for event in torchcompile.report().events)
    assert broke is (program in BROKEN)
