"""Optimizers' steps through the whole stack: eager's over ten steps, state included, as the learning rate changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import torchcompile

pytestmark = pytest.mark.expected_eager()  # nothing, but for what tests say themselves

Make = Callable[[Any], Optimizer]
WAYS: dict[str, dict[str, Any]] = {
    "": {"foreach": False},
    " foreach": {"foreach": True},
    " fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.1}),
    "SGD momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampening": (SGD, {"lr": 0.001, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    "Adam": (Adam, {"lr": 0.01}),
    "Adam amsgrad": (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW amsgrad": (AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
}


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return net, copy.deepcopy(net)


def loss(net: nn.Module, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return net(torch.randn(5, 4, dtype=torch.float64)).square().sum()


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def slow_down(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.9)
        else:
            group["lr"] *= 0.9


def check_state(net: nn.Module, ours: Optimizer, twin: nn.Module, theirs: Optimizer) -> None:
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        close(p, q)
        state, expected = ours.state[p], theirs.state[q]
        assert list(state) == list(expected)
        for key, value in state.items():
            close(value, expected[key])


@pytest.mark.parametrize("rate", ["float", "tensor"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps(name: str, way: str, rate: str) -> None:
    kind, settings = OPTIMIZERS[name]
    net, twin = nets()
    made = []
    for one in (net, twin):
        lr = torch.tensor(settings["lr"], dtype=torch.float64) if rate == "tensor" else settings["lr"]
        try:
            made.append(kind(one.parameters(), **{**settings, **WAYS[way], "lr": lr}))
        except (ValueError, RuntimeError) as error:
            pytest.skip(f"eager refuses it: {error}")  # tensor rates of foreach without capturable
    ours, theirs = made
    step = torchcompile.compile(ours.step, fullgraph=True, options={"strict": True})
    for seed in range(10):
        for one, optimizer in ((net, ours), (twin, theirs)):
            optimizer.zero_grad()
            loss(one, seed).backward()
            slow_down(optimizer)
        step()
        theirs.step()
        check_state(net, ours, twin, theirs)
    report = torchcompile.report()
    assert not report.breaks and not report.fallbacks, report
    # The first step makes the state where there is any; the next finds it, and that the rate is not always the same.
    assert report.captured <= 2, report
    copy.deepcopy(ours.state_dict())


def test_a_schedule_and_what_else_changes_between_steps() -> None:
    net, twin = nets()
    runs = []
    for one in (net, twin):
        optimizer = AdamW(one.parameters(), lr=0.01)
        runs.append((one, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)))
    step = torchcompile.compile(runs[0][1].step, options={"strict": True})
    for seed in range(12):
        for one, optimizer, schedule in runs:
            optimizer.zero_grad()
            loss(one, seed).backward()
            if seed == 4:
                one[0].weight.grad = None
            if seed == 5:
                one[2].requires_grad_(False)
            if seed == 6:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))], "lr": 0.5})
            if seed >= 6:
                optimizer.param_groups[1]["params"][0].grad = torch.ones(2, dtype=torch.float64)
            if seed == 8:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if seed == 9:
                optimizer.param_groups[0]["betas"] = (0.8, 0.9)
            (step if one is net else optimizer.step)()
            if seed < 6:
                schedule.step()
        for a, b in zip(runs[0][1].param_groups, runs[1][1].param_groups, strict=True):
            for p, q in zip(a["params"], b["params"], strict=True):
                close(p, q)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_whole_training_step(name: str) -> None:
    """Forward, loss, backward and the optimizer's step are one graph: that of the first step, and that of all others."""
    kind, settings = OPTIMIZERS[name]
    net, twin = nets()
    ours, theirs = kind(net.parameters(), **settings), kind(twin.parameters(), **settings)

    def train(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = model(x).square().sum()
        value.backward()
        optimizer.step()
        return value.detach()

    compiled = torchcompile.compile(train, options={"strict": True})
    captured = []
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(5, 4, dtype=torch.float64)
        close(compiled(net, ours, x), train(twin, theirs, x))
        captured.append(torchcompile.report().captured)
    assert captured[2] == captured[-1] == 2
    assert not torchcompile.report().fallbacks
    check_state(net, ours, twin, theirs)
