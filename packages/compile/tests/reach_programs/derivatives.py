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


def _branch(row: torch.Tensor) -> torch.Tensor:
    return torch.cond(row.sum() > 0, lambda t: t.sin(), lambda t: t * t, (row,)).sum()


def _branched(x: torch.Tensor) -> Any:
    positive = x.sum(1, keepdim=True) > 0
    each = torch.where(positive, x.sin(), x * x).sum(1)
    slopes = torch.where(positive, x.cos(), 2 * x)
    bends = torch.where(positive, -x.sin(), 2 * torch.ones_like(x))
    return each, slopes, torch.diag_embed(bends), (slopes * x).sum(1)


@part(FUNC, "torch.cond under vmap, grad, hessian and jvp", judge=_branched)  # eager's raise
def func_of_cond(x: torch.Tensor) -> Any:
    along = lambda row: torch.func.jvp(_branch, (row,), (row,))[1]
    transforms = (_branch, torch.func.grad(_branch), torch.func.hessian(_branch), along)
    return tuple(torch.vmap(transform)(x) for transform in transforms)


def _grown(row: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda t: t.abs().sum() < 4, lambda t: (t * 1.5,), (row * 1,))[0].sum()  # type: ignore[no-any-return]


def _grown_by_hand(x: torch.Tensor) -> Any:
    factor = torch.ones_like(x[:, :1])
    for _ in range(40):
        factor = torch.where((x.detach() * factor).abs().sum(1, keepdim=True) < 4, factor * 1.5, factor)
    total = (x * factor).sum(1)
    return total, factor.expand_as(x).clone(), total


@part(FUNC, "while_loop under vmap, grad and jvp", judge=_grown_by_hand)  # eager's raise
def func_of_loop(x: torch.Tensor) -> Any:
    along = lambda row: torch.func.jvp(_grown, (row,), (row,))[1]
    return tuple(torch.vmap(transform)(x) for transform in (_grown, torch.func.grad(_grown), along))


def _rolled(row: torch.Tensor) -> torch.Tensor:
    return scan(lambda carry, item: ((carry * item).sin(), carry + item), row.sum(), row)[1].sum()  # type: ignore[no-any-return]


def _rolled_by_hand(row: torch.Tensor) -> torch.Tensor:
    carry, total = row.sum(), row.sum() * 0
    for item in row:
        carry, total = (carry * item).sin(), total + carry + item
    return total


def _of_rows(function: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    transforms = (function, torch.func.grad(function), torch.func.hessian(function))
    return lambda x: tuple(torch.vmap(transform)(x) for transform in transforms)


@part(FUNC, "scan under vmap, grad and hessian", judge=_of_rows(_rolled_by_hand))  # eager's raise
def func_of_scan(x: torch.Tensor) -> Any:
    return _of_rows(_rolled)(x)


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
