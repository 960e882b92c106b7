"""State that a call replaces (running statistics, counters, caches) is written where it lies, once, and nothing else of
the call looks at it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchcompile

pytestmark = pytest.mark.warm


class State(nn.Module):
    """Buffers, and a program that writes to them."""

    def __init__(self, program: Callable[[State, Tensor], object]) -> None:
        super().__init__()
        self.program = program
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("total", torch.zeros(6))
        self.register_buffer("both", torch.arange(12.0))
        self.register_buffer("wide", torch.zeros(6, 2)[:, 0])  # with gaps

    def forward(self, x: Tensor) -> object:
        return self.program(self, x)


def returned(self: State, x: Tensor) -> object:
    made = self.total + x.sum(0)
    self.total.copy_(made)
    return made


def old_and_new(self: State, x: Tensor) -> object:
    old = self.total * 1
    self.total.add_(x.sum(0))
    return old, self.total * 2


def old_as_it_is(self: State, x: Tensor) -> object:
    old = self.total.clone()
    self.total.mul_(0.5).add_(x[0])
    return old + x


def read_after(self: State, x: Tensor) -> object:
    self.total.add_(1)
    return x * self.total + self.total.flip(0)


def moved(self: State, x: Tensor) -> object:
    self.total.copy_(self.total.flip(0) + x[0])
    return x.sum()


def parts(self: State, x: Tensor) -> object:
    self.both[:6].add_(x[0])
    self.both[6:].mul_(2)
    return self.both.sum()


def gaps(self: State, x: Tensor) -> object:
    self.wide.add_(x[0])
    return self.wide * x


def view(self: State, x: Tensor) -> object:
    made = self.total * 3 + x[0]
    self.total.copy_(made)
    return made.view(2, 3)


def normalised(self: State, x: Tensor) -> object:
    return self.norm(x)


@pytest.mark.parametrize(
    "program", [returned, old_and_new, old_as_it_is, read_after, moved, parts, gaps, view, normalised]
)
@pytest.mark.parametrize("grad", [False, True])
def test_replaced_state_is_as_in_eager(program: Callable[[State, Tensor], object], grad: bool) -> None:
    torch.manual_seed(0)
    net = State(program)
    eager = copy.deepcopy(net)
    eager.load_state_dict(net.state_dict())
    compiled = torchcompile.compile(net, fullgraph=True)
    kept: list[tuple[object, object]] = []
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = torch.randn(5, 6, requires_grad=grad)
            kept.append((compiled(x), eager(x)))
    torch.testing.assert_close([ours for ours, _ in kept], [theirs for _, theirs in kept])
    torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))


def test_running_statistics_are_not_copied() -> None:
    net = nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6))
    compiled = torchcompile.compile(net, fullgraph=True)
    x = torch.randn(5, 8)
    compiled(x).sum().backward()
    with torch.profiler.profile() as profile:
        compiled(x)
    copies = sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")
    assert copies == 0
    assert [int(norm.num_batches_tracked) for norm in (net[1], net[3])] == [2, 2]
