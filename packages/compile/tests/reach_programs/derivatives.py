"""Derivatives that the program takes itself, by torch.func and by autograd, and whole training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import forward_ad

from .record import Program, maker, part

FUNC = "torch.func"


def scalar(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


@part(FUNC, "grad")
def func_grad(x: torch.Tensor) -> Any:
    return torch.func.grad(scalar)(x)


@part(FUNC, "value_and_grad")
def func_value_and_grad(x: torch.Tensor) -> Any:
    return torch.func.grad_and_value(scalar)(x)


@part(FUNC, "vmap")
def func_vmap(x: torch.Tensor) -> Any:
    return torch.vmap(lambda row: (row * row).sum())(x)


@part(FUNC, "vmap of grad")
def func_per_sample(x: torch.Tensor) -> Any:
    return torch.vmap(torch.func.grad(scalar))(x)


class Clamped(torch.autograd.Function):
    """Lets gradients through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 + x.square())


@part(FUNC, "an autograd function under vmap of grad", gradient=False)
def func_of_function(x: torch.Tensor) -> Any:
    return torch.vmap(torch.func.grad(lambda row: scalar(Clamped.apply(row))))(x)


class Scaled(torch.autograd.Function):
    """With a batching rule and a forward-mode derivative of its own."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:  # type: ignore[override]
        return x.sin() * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return tangent * x.cos() * ctx.factor

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, factor: float) -> Any:
        return Scaled.apply(x.movedim(in_dims[0], 0), factor), 0


@part(FUNC, "an autograd function's own vmap and jvp", gradient=False)
def func_of_own_rules(x: torch.Tensor) -> Any:
    each = torch.vmap(lambda row: Scaled.apply(row, 2.0))(x)
    slopes = torch.vmap(torch.func.grad(lambda row: Scaled.apply(row, 2.0).sum()))(x)
    return each, slopes, torch.func.jvp(lambda t: Scaled.apply(t, 3.0), (x,), (x,))


def _along(function: Program) -> Program:
    return lambda row: torch.func.jvp(function, (row,), (row,))[1]


def _of_rows(function: Program) -> Program:
    """A function, its gradient and its derivative along the argument, of each row of a batch."""
    return lambda x: tuple(torch.vmap(f)(x) for f in (function, torch.func.grad(function), _along(function)))


def _row_by_row(function: Program) -> Program:
    """The same of a function in Python, whose way the data decides."""
    return lambda x: tuple(
        torch.stack([f(row) for row in x]) for f in (function, torch.func.grad(function), _along(function))
    )


def _one_way(row: torch.Tensor) -> torch.Tensor:
    return (row.sin() if row.sum() > 0 else row * row * row).sum()


@part(FUNC, "torch.cond under vmap, grad and jvp", judge=_row_by_row(_one_way))  # eager's raise
def func_of_cond(x: torch.Tensor) -> Any:
    chosen = lambda row: torch.cond(row.sum() > 0, lambda t: t.sin(), lambda t: t * t * t, (row,)).sum()
    return _of_rows(chosen)(x)


def _grown(row: torch.Tensor) -> torch.Tensor:
    while row.square().sum() < 9:
        row = row * 1.5 + row.sin()
    return row.sin().sum()


@part(FUNC, "while_loop under vmap, grad and jvp", judge=_row_by_row(_grown))  # eager's raise
def func_of_loop(x: torch.Tensor) -> Any:
    looped = lambda row: while_loop(lambda t: t.square().sum() < 9, lambda t: (t * 1.5 + t.sin(),), (row * 1,))[0]
    return _of_rows(lambda row: looped(row).sin().sum())(x)


def _rolled(row: torch.Tensor) -> torch.Tensor:
    carry, rows = row.sum(), []
    for item in row:
        rows.append(carry + item)
        carry = (carry * item).sin()
    return torch.stack(rows).sin().sum()


@part(FUNC, "scan under vmap, grad and jvp", judge=_row_by_row(_rolled))  # eager's raise
def func_of_scan(x: torch.Tensor) -> Any:
    step = lambda carry, item: ((carry * item).sin(), carry + item)
    return _of_rows(lambda row: scan(step, row.sum(), row)[1].sin().sum())(x)


@part(FUNC, "jvp")
def func_jvp(x: torch.Tensor) -> Any:
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))


@part(FUNC, "vjp")
def func_vjp(x: torch.Tensor) -> Any:
    value, pull = torch.func.vjp(torch.sin, x)
    return value, pull(torch.ones_like(value))[0]


def linearized_by_hand(x: torch.Tensor) -> Any:
    at = x.detach()
    slope = at.cos() * at + at.sin()
    return at.sin() * at, slope * x, slope * torch.ones_like(x)


@part(FUNC, "linearize", judge=linearized_by_hand)  # in inference mode eager's gives zeros, as a parameter
def func_linearize(x: torch.Tensor) -> Any:
    value, push = torch.func.linearize(lambda t: t.sin() * t, x.detach())
    return value, push(x), push(torch.ones_like(x))


@part(FUNC, "jacrev")
def func_jacrev(x: torch.Tensor) -> Any:
    return torch.func.jacrev(lambda t: t.sin().sum(0))(x)


@part(FUNC, "jacfwd")
def func_jacfwd(x: torch.Tensor) -> Any:
    return torch.func.jacfwd(lambda t: t.sin().sum(0))(x)


@part(FUNC, "hessian")
def func_hessian(x: torch.Tensor) -> Any:
    return torch.func.hessian(scalar)(x)


@maker(FUNC, "functional_call")
def func_functional_call() -> Program:
    net = nn.Linear(3, 3).double()
    weights = {name: p.detach() for name, p in net.named_parameters()}
    return lambda x: torch.func.functional_call(net, weights, (x,))


@part(FUNC, "autograd.grad within")
def inner_grad(x: torch.Tensor) -> Any:
    y = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(y.sin().sum(), y)
    return g * x


@part(FUNC, "autograd.grad within, differentiated again")
def penalised(x: torch.Tensor) -> Any:
    y = x.detach().requires_grad_()
    (g,) = torch.autograd.grad((y * x).sin().sum(), y, create_graph=True)
    return (g.norm() - 1) ** 2


@part(FUNC, "backward(create_graph=True)")
def backward_with_history(x: torch.Tensor) -> Any:
    (x.sin() * x).sum().backward(create_graph=True)
    assert x.grad is not None
    found = x.grad.square()
    x.grad = None
    return found


@part(FUNC, "forward-mode dual numbers")
def duals(x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x)).sin()).tangent


STEPS = "Training steps"


def _step(make: Callable[[Any], torch.optim.Optimizer], clip: bool) -> Program:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = make(net.parameters())

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        return loss.detach(), [p.detach().clone() for p in net.parameters()]

    return step


@maker(STEPS, "backward() and SGD", gradient=False)
def sgd_step() -> Program:
    return _step(lambda p: torch.optim.SGD(p, 0.1), clip=False)


@maker(STEPS, "backward(), clipping and AdamW", gradient=False)
def adam_step() -> Program:
    return _step(lambda p: torch.optim.AdamW(p, 0.1), clip=True)
