"""Derivatives of higher order where sizes are symbols: right at every size, and told where one is made again.

What a derivative is made of is traced when it is asked for first, long after capture has guarded sizes: whatever that
trace takes for granted of them is to be checked at the next call, too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchcompile
from primtorch.ledger import LEDGER

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.expected_eager()]


class Of(nn.Module):
    """A function of the input, scaled by a parameter."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


Draw = Callable[[int], torch.Tensor]
ROWS: Draw = lambda n: torch.randn(n, 5)
LINES: Draw = lambda n: torch.randn(n, 3, n + 3)
PICTURES: Draw = lambda n: torch.randn(n, 3, n + 3, n + 5)

NETS: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 1)), ROWS),
    "batch norm of pictures": (lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Tanh()), PICTURES),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv1d(4, 2, 3, 2)), LINES),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 2, 3, stride=2), nn.Tanh()), PICTURES),
    "layer norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1)), ROWS),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm1d(3, affine=True), nn.SiLU()), LINES),
    "average pool": (lambda: nn.Sequential(nn.AvgPool2d(2), nn.Tanh(), nn.AdaptiveAvgPool2d(2)), PICTURES),
    "upsample": (lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Tanh()), PICTURES),
    "softmax": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Softmax(0), nn.LogSoftmax(1)), ROWS),
    "mean": (lambda: Of(lambda x: x.mean(0).exp() * x.std(1).sum()), ROWS),
    "variance": (lambda: Of(lambda x: x.var(0) * x.sum() / x.shape[0] + x.prod(0) + x.cumsum(0)), ROWS),
    "cat": (lambda: Of(lambda x: torch.cat([x, x.sin(), x.flip(0)]).sort(0)[0]), ROWS),
    "matmul": (lambda: Of(lambda x: x.t() @ x @ x.t()), ROWS),
}


def derivatives(net: nn.Module, call: Callable[..., Any], x: torch.Tensor, order: int) -> list[torch.Tensor | None]:
    """Each derivative by `x` up to that order, and what the last backward leaves in the parameters."""
    x = x.clone().requires_grad_()
    value = call(x).sin().sum()
    found: list[torch.Tensor | None] = [value.detach()]
    for _ in range(order - 1):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        found.append(slope.detach())
        value = slope.square().sum()
    net.zero_grad()
    value.backward()
    return [*found, x.grad, *(p.grad for p in net.parameters())]


def check(name: str, order: int, backend: str) -> None:
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    make, draw = NETS[name]
    net = make()
    other = copy.deepcopy(net)
    compiled = torchcompile.compile(other, backend=backend, dynamic=True)
    for size in random.Random(seed).sample(range(2, 8), 3):
        x = draw(size)
        expected, found = derivatives(net, net, x, order), derivatives(other, compiled, x, order)
        assert [t is None for t in found] == [t is None for t in expected], f"seed {seed}, size {size}"
        for a, b in zip(found, expected, strict=True):
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, msg=lambda m, size=size: f"seed {seed}, size {size}: {m}")  # type: ignore[misc]


@pytest.mark.parametrize("name", NETS)
def test_second_derivatives(name: str) -> None:
    check(name, 2, "aot_eager")


def test_third_derivatives() -> None:
    """Torch's formula fixes sizes in the derivative before it: those of the trial, not of the first call."""
    check("transposed", 3, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", NETS)
def test_derivatives(name: str, order: int, backend: str) -> None:
    check(name, order, backend)


@pytest.mark.parametrize(("name", "order"), [("batch norm", 2), ("mean", 3)])
def test_derivatives_of_generated_kernels(name: str, order: int) -> None:
    check(name, order, "inductor")


def told() -> int:
    return sum(event.count for event in LEDGER.events if event.kind.id == "made_for_other_sizes")


def test_what_is_made_again_is_told_and_kept() -> None:
    """Torch's formula of this derivative reads sizes as numbers: one program for each size, made once."""
    torchcompile.reset()
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Tanh())
    compiled = torchcompile.compile(net, backend="aot_eager", dynamic=True)
    before = told()
    for size, is_new in ((4, False), (6, True), (4, False), (6, False), (3, True)):
        derivatives(net, compiled, torch.randn(size, 5), 2)
        assert (told() > before) == is_new, size
        before = told()


def test_looking_at_what_autograd_keeps_fixes_no_size() -> None:
    """A mean's node keeps the sizes; who looks whether it was freed reads them as numbers."""
    torchcompile.reset()
    compiled = torchcompile.compile(lambda x: x.mean(0).exp(), backend="aot_eager", dynamic=True)
    for size in (4, 6, 3):
        compiled(torch.randn(size, 5, requires_grad=True)).sum().backward()
    assert told() == 0 and not torchcompile.report().recompiles
