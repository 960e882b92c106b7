"""What a call hands out is its own: what its caller writes there, no later call reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torchcompile

pytestmark = pytest.mark.warm

Tensor = torch.Tensor
NUMBERS = [1.0, 2.5, -3.0]

# Results that depend on no element of the input, and parts of them: a graph could hold them ready.
MADE: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: torch.tensor(NUMBERS),
    "tensor of a number": lambda x: torch.tensor(2.0),
    "tensor of integers": lambda x: torch.tensor([[1, 2], [3, 4]]),
    "tensor of a dtype": lambda x: torch.tensor([1, 2], dtype=torch.float64),
    "tensor twice": lambda x: (torch.tensor(NUMBERS), torch.tensor(NUMBERS)),
    "one tensor twice": lambda x: (lambda t: (t, t.view(3, 1), [t]))(torch.tensor(NUMBERS)),
    "tensor of the sizes": lambda x: torch.tensor(x.shape),
    "new_tensor": lambda x: x.new_tensor(NUMBERS),
    "as_tensor": lambda x: torch.as_tensor(NUMBERS),
    "asarray": lambda x: torch.asarray(NUMBERS),
    "scalar_tensor": lambda x: torch.scalar_tensor(3),
    "a row": lambda x: torch.tensor([NUMBERS, NUMBERS])[1],
    "turned": lambda x: torch.tensor([NUMBERS, NUMBERS]).t(),
    "detached": lambda x: torch.tensor(NUMBERS).detach(),
    "cast to what it is": lambda x: torch.tensor(NUMBERS).to(torch.get_default_dtype()).contiguous(),
    "read, too": lambda x: (lambda t: (t, x * t))(torch.tensor(NUMBERS)),
    "written, too": lambda x: (lambda t: t.add_(x.detach()))(torch.tensor(NUMBERS)),
    "zeros": lambda x: (torch.zeros(3), torch.zeros(3)),
    "full": lambda x: torch.full((2,), 7.0),
    "arange": lambda x: torch.arange(4),
    "eye": lambda x: torch.eye(3)[1:],
    "linspace": lambda x: torch.linspace(0, 1, 3).flip(0),
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=False),
    "an array": lambda x: torch.from_numpy(np.arange(3.0)),
    "an input's copy": lambda x: (x.detach().clone(), x.detach().clone()),
    "of one element": lambda x: torch.tensor([1.5]).repeat(3),
    "a parameter's initial value": lambda x: nn.init.constant_(torch.empty(3), 4.0),
}


def _written_between(call: Callable[[Tensor], Any], gradient: bool) -> list[list[Tensor]]:
    """The results of three calls, each of which are written to before the next."""
    found = []
    for step in range(3):
        x = torch.linspace(0, 1, 3).add(step).requires_grad_(gradient)
        results = [t for t in pytree.tree_leaves(call(x)) if isinstance(t, Tensor)]
        found.append([t.detach().clone() for t in results])
        with torch.no_grad():
            for t in results:
                t.add_(1)
    return found


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("made", MADE)
def test_results_are_written_between_calls(made: str, backend: str, gradient: bool) -> None:
    def program(x: Tensor) -> Any:
        return MADE[made](x), x * 2

    compiled = torchcompile.compile(program, backend=backend, fullgraph=True)
    torch.testing.assert_close(_written_between(compiled, gradient), _written_between(program, gradient))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_are_written_between_calls(backend: str) -> None:
    """As clipping and scaling do: gradients that depend on nothing are the next call's as they were."""

    def steps(call: Callable[..., Tensor]) -> list[Tensor]:
        found = []
        for _ in range(3):
            given = [torch.ones(3, requires_grad=True) for _ in range(3)]
            gradients = torch.autograd.grad(call(*given), given)
            found += [g.clone() for g in gradients]
            for g in gradients:
                if 0 not in g.stride():
                    g.mul_(5)
        return found

    def program(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a * torch.tensor(NUMBERS)).sum() + (b * torch.tensor(NUMBERS)).sum() + (c * 2).sum()

    torch.testing.assert_close(steps(torchcompile.compile(program, backend=backend)), steps(program))
