"""Autograd functions under transforms of torch.func: their own derivatives and batching rules, never those of their
operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import torchcompile

pytestmark = pytest.mark.expected_eager(...)
Program = Callable[[torch.Tensor], Any]


class Straight(torch.autograd.Function):
    """Rounds, and hands on twice the gradient: the derivative of its operators is zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


class ByResult(torch.autograd.Function):
    """Keeps a result and a number; one of two results has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return (x * scale).exp(), x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (value,) = ctx.saved_tensors
        return gradient * value * ctx.scale, None


class OwnRules(Straight):
    """With a batching rule and a forward derivative that are like nothing else."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return OwnRules.apply(x) + 1, in_dims[0]

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tangent * 5


class Older(torch.autograd.Function):
    """Of the form that transforms refuse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


FUNCTIONS: dict[str, Program] = {
    "straight": Straight.apply,
    "by result": lambda x: ByResult.apply(x, 0.5)[0] * x,
    "own rules": OwnRules.apply,
    "older": Older.apply,
    "under no_grad": lambda x: _without(x) * x,
    "twice": lambda x: Straight.apply(ByResult.apply(x, 2.0)[0] * x),
}


def _without(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = Straight.apply(x * 3)
        return made


def along(function: Program, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), x.detach().cos())
        return forward_ad.unpack_dual(function(dual)).tangent


TRANSFORMS: dict[str, Callable[[Program], Program]] = {
    "vmap": lambda f: vmap(f),
    "grad": lambda f: grad(lambda t: f(t).sum()),
    "vmap of grad": lambda f: vmap(grad(lambda t: f(t).pow(2).sum())),
    "grad of vmap": lambda f: grad(lambda t: vmap(f)(t).pow(2).sum()),
    "grad of grad": lambda f: grad(lambda t: grad(lambda u: (f(u) * u).sum())(t).sin().sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](x)[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "jacrev": lambda f: lambda x: jacrev(f)(x[0]),
    "jacfwd": lambda f: lambda x: jacfwd(f)(x[0]),
    "hessian": lambda f: lambda x: hessian(lambda t: f(t).pow(2).sum())(x[0]),
    "a level of dual numbers": lambda f: lambda x: along(f, x),
}
IN_ONE_GRAPH = {
    (function, transform)
    for function in ("straight", "by result", "twice", "under no_grad")
    for transform in ("vmap", "grad", "vmap of grad", "grad of vmap", "grad of grad", "vjp", "jacrev")
} | {("own rules", transform) for transform in TRANSFORMS if transform != "a level of dual numbers"}


def outcome(program: Program, x: torch.Tensor) -> list[Any]:
    """Results, gradients, and their gradients; or what is raised."""
    try:
        leaves = pytree.tree_leaves(program(x))
    except Exception as error:
        return [type(error)]
    found = [*leaves]
    for _ in range(2):
        floats = [t for t in leaves if t.requires_grad]
        if not floats:
            break
        total: Any = sum((t.sin() * t).sum() for t in floats)
        leaves = list(torch.autograd.grad(total, x, create_graph=True))
        found += leaves
    return found


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_its_derivatives_are_its_own(function: str, transform: str, requires_grad: bool) -> None:
    program = TRANSFORMS[transform](FUNCTIONS[function])
    compiled = torchcompile.compile(lambda x: program(x), backend="aot_eager")
    for rows in (3, 3, 4):
        torch.manual_seed(rows)
        x = torch.randn(rows, 2, dtype=torch.float64, requires_grad=requires_grad)
        found, wanted = outcome(compiled, x), outcome(program, x)
        if wanted and isinstance(wanted[0], type):
            assert found == wanted
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    if (function, transform) in IN_ONE_GRAPH and not requires_grad:
        assert torchcompile.report().clean
