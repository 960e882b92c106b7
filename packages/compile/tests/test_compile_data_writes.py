"""`tensor.data = value`: values, gradients and shared memory as eager has them, in one graph where that can be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import torchcompile
from aotautograd.errors import DoubleBackwardUnavailable
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


def written_through_data(x, p, q):
    p.data = q.detach() * 1
    p.data.mul_(2)
    p.detach()[:1] += 3
    return p * x


def written_with_a_history(x, p, q):
    y = x * p
    y.data = q.detach() * 1
    y.mul_(x)
    y[1:].add_(p[1:])
    return y * y


def written_through_the_other(x, p, q):
    y = x * p
    y.data = q
    y.add_(1)
    q.mul_(2)
    return y * 3, q * x


def written_and_handed_out(x, p, q):
    y = x * p
    y.data = q
    y.add_(1)
    return y, q, y.detach()


def written_under_no_grad(x, p, q):
    y = x * p
    y.data = q.detach() + 1
    with torch.no_grad():
        y.mul_(2)
        y[0] = 5
    return y * y


def set_written_and_set(x, p, q):
    y = x.sin()
    y.data = q
    y.add_(p)
    y.data = q * 3
    y.mul_(2)
    return y * x


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
    written_behind, written_through_data, written_with_a_history, written_through_the_other, written_and_handed_out,
    written_under_no_grad, set_written_and_set,
)  # fmt: skip
BROKEN: tuple[Program, ...] = (used_before, derived_behind, another_size, between_breaks)


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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", [of_a_made_tensor, written_with_a_history, set_written_and_set])
def test_a_second_derivative_is_eagers_or_refused(program: Program, backend: str) -> None:
    """It reads what the tensor was, through which gradients go, and which the forward's nodes do not tell."""
    found = []
    for run in (program, torchcompile.compile(program, backend=backend)):
        x, p = (torch.linspace(1, stop, 3, dtype=torch.float64).requires_grad_() for stop in (2, 3))
        total = run(x, p, torch.ones(3, dtype=torch.float64)).square().sum()
        try:
            first = torch.autograd.grad(total, (x, p), create_graph=True)
            found.append(torch.autograd.grad([g.sum() for g in first], (x, p)))
        except DoubleBackwardUnavailable as error:
            assert __file__ in str(error)
            return
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_view_of_a_function_stays_one(backend: str) -> None:
    """What an autograd function gives of another's memory is a view, to which nobody may write; what was given that
    memory is none."""

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return y.view_as(y)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return gradient * 2, None

    def given(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x * 2
        z.data = y
        return z

    for program, refused in ((Other.apply, True), (given, False)):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3)
        result = torchcompile.compile(lambda x, y, program=program: program(x, y), backend=backend)(x, y)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace") if refused else nullcontext():
            result.add_(1)
            result.sum().backward()
            assert y.tolist() == [2.0] * 3 and x.grad is not None and x.grad.tolist() == [2.0] * 3
