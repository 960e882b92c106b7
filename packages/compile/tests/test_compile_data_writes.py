"""`tensor.data = value`: values, gradients and shared memory as eager has them, in one graph where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchcompile
from primtorch.ledger import REFUSED, Effect

pytestmark = pytest.mark.warm

Program = Callable[..., Any]


def of_a_made_tensor(x, p, q):
    y = x * 1
    y.data = x.detach() * 2
    return y.sin() * p


def without_history(x, p, q):
    y = x.detach() * 1
    before = y[:1]
    y.data = q.detach() + 1
    y.add_(1)
    return y * x, before, y[:2]


def of_an_input(x, p, q):
    held = p.data
    p.data = p.data * 0.5
    return (p * x).sum(), held + 0, p.data


def twice(x, p, q):
    p.data = p.detach().clamp(-0.1, 0.1)
    first = p.detach() * x
    p.data = q.detach() - 1
    return first + p * p


def under_no_grad(x, p, q):
    with torch.no_grad():
        p.data = torch.lerp(p, q, 0.5)
    return p.exp() * x


def memory_of_another(x, p, q):
    q.data = p.data
    return x * 2


def memory_of_a_result(x, p, q):
    fresh = x.detach() + 1
    q.data = fresh
    fresh.mul_(2)
    return fresh, q + 0


def used_before(x, p, q):
    first = p * x
    p.data = q.detach() - 1
    return first + p * p


def written_behind(x, p, q):
    p.data = q.detach() * 1
    with torch.no_grad():
        p.mul_(2)
    return p * x


def derived_behind(x, p, q):
    first = p * p
    p.data = q.detach() * 1
    (g,) = torch.autograd.grad((first + p * 3).sum(), p)
    return g * x


def another_size(x, p, q):
    y = x.detach() * 1
    y.data = y[:1]
    return y * x


def between_breaks(x, p, q):
    y = x.sin()
    print(end="")
    p.data = q.detach() * 2
    y = y * p
    print(end="")
    return y * p


WHOLE: tuple[Program, ...] = (
    of_a_made_tensor, without_history, of_an_input, twice, under_no_grad, memory_of_another, memory_of_a_result,
)  # fmt: skip
BROKEN: tuple[Program, ...] = (used_before, written_behind, derived_behind, another_size, between_breaks)


def run(program: Program, size: int, grad: bool) -> list[Any]:
    """What the call gives, what it leaves behind, and who shares memory with whom."""
    with torch.set_grad_enabled(True):
        x, p = (torch.linspace(-1, stop, size, dtype=torch.float64).requires_grad_() for stop in (1, 2))
        q = torch.linspace(0, 3, size, dtype=torch.float64)
    old = p.data
    with torch.set_grad_enabled(grad):
        found = program(x, p, q)
    found = found if isinstance(found, tuple) else (found,)
    differentiable = [t for t in found if t.requires_grad]
    if differentiable:
        sum(t.sum() for t in differentiable).backward()
    every = [*found, p, q, old]
    shared = [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in every for b in every]
    return [found, p, q, old, x.grad, p.grad, p.is_leaf, shared]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("program", [*WHOLE, *BROKEN], ids=lambda f: f.__name__)
def test_data_is_set_as_in_eager(program: Program, backend: str) -> None:
    compiled = torchcompile.compile(program, backend=backend)
    for size, grad in ((3, True), (3, False), (5, True)):
        if program is derived_behind and not grad:
            continue
        torch.testing.assert_close(run(compiled, size, grad), run(program, size, grad))
    told = [event for event in torchcompile.report().events if event.effect in REFUSED - {Effect.RECOMPILE}]
    assert not told if program in WHOLE else told
