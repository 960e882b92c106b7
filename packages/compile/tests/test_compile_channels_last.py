"""A convolution net on a device that wants channels-last images: the whole program is laid out anew, eager sees none of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import torchcompile
import torchinductor
from torchinductor import CppBackend


class Wanting(CppBackend):
    """Computes on the CPU."""

    traits = replace(CppBackend.traits, channels_last=True)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each program was laid out anew."""
    found: list[bool] = []
    choose = torchinductor.choose_layouts
    monkeypatch.setattr(torchinductor, "choose_layouts", lambda graph: found.append(choose(graph)))
    torchinductor.register_codegen("cpu", Wanting())
    yield found
    torchinductor.register_codegen("cpu", CppBackend())


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        self.stem = torch.nn.Sequential(conv(3, 8, 3, 2, 1, bias=False), norm(8), torch.nn.ReLU())
        self.deep = torch.nn.Sequential(conv(8, 8, 3, 1, 1, groups=8), norm(8), torch.nn.Hardswish())
        self.gate = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), conv(8, 8, 1), torch.nn.Sigmoid())
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        x = x + self.deep(x) * self.gate(x)
        return self.head(x.mean((2, 3))), x


def step(run: torch.nn.Module, net: torch.nn.Module, x: torch.Tensor, train: bool) -> list[torch.Tensor]:
    """Results, gradients and running statistics."""
    net.train(train)
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype is torch.float32), torch.set_grad_enabled(train):
        results = run(x)
    if train:
        sum(r.float().square().mean() for r in results).backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [*(r.detach() for r in results), *grads, *(b for b in net.buffers() if b.is_floating_point())]


@pytest.mark.parametrize("train", [True, False])
def test_results_are_eagers(answers: list[bool], train: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3, 16, 20)
    eager, true = copy.deepcopy(net), copy.deepcopy(net).double()
    compiled = torchcompile.compile(net, fullgraph=True)
    triples = zip(
        step(compiled, net, x, train), step(eager, eager, x, train), step(true, true, x.double(), train), strict=True
    )
    for ours, theirs, exact in triples:
        assert ours.stride() == theirs.stride()
        limit = 2 * (theirs.double() - exact).norm() + 1e-2 * exact.norm() + 1e-6
        assert (ours.double() - exact).norm() <= limit
    assert answers == [True]
    assert not torchcompile.report().events
