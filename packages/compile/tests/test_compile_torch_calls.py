"""Calls of torch whose result, effect or argument Python sees in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchcompile
import torchdynamo
from primtorch.ledger import LEDGER


def foreach_in_place(x: torch.Tensor) -> Any:
    tensors = [x + 1, x + 2]
    given = torch._foreach_add_(tensors, 1.0)
    torch._foreach_mul_(tensors, [2.0, 3.0])
    return given is tensors, given is None, *tensors


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "foreach": foreach_in_place,
    "to_float": lambda x: (x.to(float), x.to(dtype=int), x.to(bool)),
    "to_complex": lambda x: x.to(complex) * 2,
    "dtype_of_python": lambda x: torch.zeros(3, dtype=int, device=x.device) + x.sum().to(int),
    "full_of_bool": lambda x: torch.full((2,), 1, dtype=bool) & (x.sum() > 0),
    "unique_counts": lambda x: torch.unique(x.round(), return_counts=True),
    "unique_both": lambda x: torch.unique(x.round(), return_inverse=True, return_counts=True),
    "unique_alone": lambda x: x.round().unique(),
    "new_of_a_size": lambda x: x.new(x.size()).fill_(2) * x,
    "new_of_sizes": lambda x: x.new(x.shape[0], 2).fill_(3) + torch.Tensor.new(x, x[0].size()).fill_(1).sum(),
    "new_of_elements": lambda x: x.new((1.0, 2.0)).sum() + x,
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]).sum() + x * torch.Tensor.new_tensor(x, x[0].detach()),
    "new_tensor_of_another_type": lambda x: x.new_tensor([[1, 2, 3]], dtype=torch.long) + x,
    "init": lambda x: (
        torch.nn.init.constant_(x * 2, 3.0) + torch.nn.init.zeros_(x * 2) + torch.nn.init.eye_(x[:2] * 2).sum()
    ),
    "init_without_grad": torch.no_grad()(
        lambda x: torch.nn.init.ones_(x * 2) + torch.nn.init.dirac_(x[:, :, None] * 2).sum()
    ),
    "sorted": lambda x: (*x.t().sort(dim=0, descending=True, stable=True), x.argsort(dim=1), x.sort(1).values * 2),
    "searched": lambda x: torch.searchsorted(x.sort(1).values, x, right=True) + 1,
    "complex_arithmetic": lambda x: (lambda z: (z * z.exp() - z / (z.abs() + z)).abs())(torch.complex(x, x)),
    "repeat_by_tensor": lambda x: x.repeat_interleave(torch.arange(x.shape[0]), dim=0) * 2,
    "repeat_of_counts": lambda x: torch.repeat_interleave((x[:, 0] > 0).long() + 1) + 1,
}
# The back end has no kernels for what these come to.
BY_REFERENCE = ("to_complex", "repeat_by_tensor", "repeat_of_counts")


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager_and_in_one_graph(name: str) -> None:
    program = PROGRAMS[name]
    compiled = torchcompile.compile(program, fullgraph=name not in BY_REFERENCE)
    for rows in (4, 4, 5):
        x = torch.randn(rows, 3, dtype=torch.float64) * 2
        expected, found = program(x), compiled(x)
        single = isinstance(expected, torch.Tensor)
        for a, b in zip([expected] if single else expected, [found] if single else found, strict=True):
            if isinstance(a, torch.Tensor):
                assert a.dtype is b.dtype and torch.equal(a, b)
            else:
                assert a == b


def test_sorting_and_complex_arithmetic_call_atens_overloads() -> None:
    """No prim of these is called by its reference in Python."""
    for name in ("sorted", "searched", "complex_arithmetic"):
        torchcompile.reset()
        torchcompile.compile(PROGRAMS[name])(torch.randn(4, 3, dtype=torch.float64))
        assert [event for event in LEDGER.events if event.kind.id == "operator_by_reference"] == []


_CALLS: list[int] = []


@torchdynamo.allow_in_graph
def remember(x: torch.Tensor) -> None:
    _CALLS.append(x.dim())


@torchdynamo.allow_in_graph
def count_up(x: torch.Tensor) -> None:
    x.add_(1)


def test_an_allowed_function_without_a_result_runs_at_each_call() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        remember(x)
        y = x * 2
        count_up(y)
        return y

    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(program)
    for call in range(3):
        _CALLS.clear()
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
        assert len(_CALLS) == 1 + (call == 0)  # once on a tensor without data, where it is captured


def test_whether_a_profiler_runs_is_guarded() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.autograd._profiler_enabled() else x - 1

    compiled, x = torchcompile.compile(program), torch.zeros(2)
    assert torch.equal(compiled(x), x - 1)
    with torch.autograd.profiler.profile():
        assert torch.equal(compiled(x), x + 1)
    assert torch.equal(compiled(x), x - 1)
