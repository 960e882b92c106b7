"""Dual numbers in compiled functions: primals, tangents and their gradients as eager's, which tensors have a tangent at
all, and levels that a graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad as fw

import torchcompile
from primtorch.ledger import REFUSED, Effect

Program = Callable[..., Any]

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def unpacked(x, v):
    with fw.dual_level():
        y = fw.unpack_dual((fw.make_dual(x, v) * x).sin() + 3)
    return y.primal * 2, y.tangent


def of_a_network(x, v):
    with fw.dual_level():
        return fw.unpack_dual(NET(fw.make_dual(x, v))).tangent


def by_two(x, v):
    with fw.dual_level():
        a, b = fw.make_dual(x, v), fw.make_dual(v, x.detach())
        first, second = fw.unpack_dual(a * b.exp()), fw.unpack_dual(b.cos())
        return first.tangent + second.tangent, first.primal


def by_weights(x, v):
    with fw.dual_level():
        weights = {name: fw.make_dual(p, torch.ones_like(p)) for name, p in NET.named_parameters()}
        return fw.unpack_dual(torch.func.functional_call(NET, weights, (x,))).tangent


def without_tangents(x, v):
    with fw.dual_level():
        d = fw.make_dual(x, v)
        primal = fw.unpack_dual(d).primal
        found = [fw.unpack_dual(t).tangent for t in (x.sin(), d.detach(), d > 0, primal * 2, d.argmax(), d, d.round())]
    return x * sum(t is None for t in found), found[5:], fw.unpack_dual(x.exp()).tangent is None


def two_levels(x, v):
    with fw.dual_level():
        first = fw.unpack_dual(fw.make_dual(x, v).sin()).tangent
    with fw.dual_level():
        return fw.unpack_dual(fw.make_dual(first, v).exp()).tangent


def with_a_write(x, v):
    y = x.sin()
    with fw.dual_level():
        d = fw.make_dual(x, v) * 1
        d.mul_(2)
        tangent = fw.unpack_dual(d.exp()).tangent
    return tangent + y


def with_a_break(x, v):
    y = x.sin()
    with fw.dual_level():
        d = fw.make_dual(y, v).exp()
        print(end="")
        tangent = fw.unpack_dual(d * 2).tangent
    return tangent * x


def with_draws(x, v):
    with fw.dual_level():
        return fw.unpack_dual(fw.make_dual(x, v) * torch.rand(3, dtype=x.dtype)).tangent


WHOLE: tuple[Program, ...] = (
    unpacked, of_a_network, by_two, by_weights, without_tangents, two_levels,
)  # fmt: skip
BROKEN: tuple[Program, ...] = (with_a_write, with_a_break, with_draws)


def run(program: Program, rows: int, grad: bool) -> list[Any]:
    torch.manual_seed(rows)
    x = torch.randn(rows, 3, dtype=torch.float64).requires_grad_()
    v = torch.randn(rows, 3, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        found = program(x, v)
    first = found[0] if isinstance(found, tuple) else found
    by = [x, *NET.parameters()]
    return [found, *(torch.autograd.grad(first.sum(), by, allow_unused=True) if first.requires_grad else ())]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("program", [*WHOLE, *BROKEN], ids=lambda f: f.__name__)
def test_duals_are_eagers(program: Program, backend: str) -> None:
    compiled = torchcompile.compile(program, backend=backend)
    for rows, grad in ((2, True), (2, False), (4, True)):
        torch.testing.assert_close(run(compiled, rows, grad), run(program, rows, grad))
    told = [event for event in torchcompile.report().events if event.effect in REFUSED - {Effect.RECOMPILE}]
    assert told if program in BROKEN else not told


@pytest.mark.parametrize("program", [unpacked, without_tangents], ids=lambda f: f.__name__)
def test_under_inference_mode_nothing_has_a_tangent(program: Program) -> None:
    compiled = torchcompile.compile(program, backend="aot_eager")
    x = torch.randn(2, 3, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, x), program(x, x))
    assert torchcompile.report().clean
