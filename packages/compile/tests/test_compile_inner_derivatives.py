"""Derivatives that a program takes itself and differentiates again: values and gradients as eager's, in one graph where
that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd.function import once_differentiable

import torchcompile
from primtorch.ledger import REFUSED, Effect

Program = Callable[..., Any]


class Squared(torch.autograd.Function):
    """Keeps an argument and its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return g * (x.cos() * y + x)


class SquaredOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * g * x


def slope(value: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value.sum(), by, create_graph=True)[0]


def penalty(x, w):
    at = (x * 0.3).detach().requires_grad_()
    return (slope((at * w).tanh(), at).norm(2, 1) - 1).square().mean()


def through_a_function(x, w):
    return (slope(Squared.apply(x * w), x) * w).sin()


def through_a_function_twice(x, w):
    return slope(slope(Squared.apply(Squared.apply(x) * w), x), x)


def through_a_function_that_is_once_differentiable(x, w):
    return (torch.autograd.grad(SquaredOnce.apply(x * w).sum(), x)[0] * w).sin()


def through_cond(x, w):
    y = torch.cond(x.sum() > 0, lambda t: (t * w).sin(), lambda t: t.exp() * w, (x,))
    return slope(y, x).square()


def branching(x, w):
    y = (x * w).sin() if x.sum() > 0 else x.exp() * w
    return slope(y, x).square()


def through_a_scan(x, w):
    last, _ = scan(lambda carry, row: ((carry * row).sin() + row, carry * 1), w * 1, x)
    return slope(last, x).square().sum() * w


def row_by_row(x, w):
    carry = w * 1
    for row in x:
        carry = (carry * row).sin() + row
    return slope(carry, x).square().sum() * w


def of_a_loop(x, w):
    _, y = while_loop(
        lambda i, t: i < 3, lambda i, t: (i + 1, (t * w).sin()), (torch.zeros((), dtype=torch.int64), x * 1)
    )
    return torch.autograd.grad(y.sum(), x)[0]


def repeated(x, w):
    y = x * 1
    for _ in range(3):
        y = (y * w).sin()
    return torch.autograd.grad(y.sum(), x)[0]


def inner_steps(x, w):
    fast = w * 1
    for _ in range(2):
        fast = fast - 0.1 * slope((x.detach() * fast).sin().square(), fast)
    return (x.detach() * fast).cos()


def into_grad(x, w):
    (x * w).sin().sum().backward(create_graph=True)
    found = x.grad * w.grad
    x.grad = w.grad = None
    return found


def onto_grad(x, w):
    w.grad = x.detach()[0] * w
    ((x * w).sin()).sum().backward(create_graph=True, inputs=[w])
    found = w.grad.square()
    w.grad = None
    return found


def escaping(x, w):
    at = (x * 0.3).detach().requires_grad_()
    return (slope((at * w).tanh(), at) - 1).square().mean(), at


def between_breaks(x, w):
    y = x.sin()
    print(end="")
    y = y * slope((x * w).tanh(), x)
    print(end="")
    return y * w


# Each with what says the same in plain Python, where eager's own operator has no second derivative.
WHOLE: tuple[tuple[Program, Program], ...] = (
    (penalty, penalty), (through_a_function, through_a_function), (through_a_function_twice, through_a_function_twice),
    (through_a_function_that_is_once_differentiable,) * 2, (through_cond, branching), (through_a_scan, row_by_row),
    (of_a_loop, repeated), (inner_steps, inner_steps), (into_grad, into_grad), (onto_grad, onto_grad),
)  # fmt: skip
BROKEN: tuple[tuple[Program, Program], ...] = ((escaping, escaping), (between_breaks, between_breaks))


def run(program: Program, rows: int, sign: float) -> list[Any]:
    x = (torch.linspace(-1, 2, rows * 3, dtype=torch.float64).reshape(rows, 3) * sign).requires_grad_()
    w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
    found = program(x, w)
    first = found[0] if isinstance(found, tuple) else found
    return [found, *(torch.autograd.grad(first.sum(), (x, w), allow_unused=True) if first.requires_grad else ())]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("program, judge", [*WHOLE, *BROKEN], ids=lambda f: f.__name__)
def test_inner_derivatives_are_eagers(program: Program, judge: Program, backend: str) -> None:
    compiled = torchcompile.compile(program, backend=backend)
    for rows, sign in ((2, 1.0), (2, -1.0), (4, 1.0)):
        torch.testing.assert_close(run(compiled, rows, sign), run(judge, rows, sign))
    told = [event for event in torchcompile.report().events if event.effect in REFUSED - {Effect.RECOMPILE}]
    assert told if (program, judge) in BROKEN else not told
