"""Optimizers' steps compiled: equal to eager's over several steps, two compiles for all of them, no breaks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import torchdynamo


def captured(function: Any, **options: Any) -> tuple[Any, list[fx.GraphModule]]:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    options.setdefault("strict", True)
    return torchdynamo.optimize(backend, options=torchdynamo.CaptureOptions(**options))(function), graphs


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return net, copy.deepcopy(net)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "SGD nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD tensor lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, foreach=False),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False, weight_decay=0.1),
    "Adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64), foreach=False),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def gradients(net: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    net(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_is_eagers_step(name: str) -> None:
    torchdynamo.reset()
    net, twin = nets()
    ours, theirs = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](twin.parameters())
    step, graphs = captured(ours.step, fullgraph=True)
    for seed in range(10):
        gradients(net, seed)
        gradients(twin, seed)
        step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert len(graphs) <= 3, "the first step makes the state, the others find it"
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        state, expected = ours.state[a], theirs.state[b]
        assert state.keys() == expected.keys()
        for key, value in state.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-12)
    copy.deepcopy(ours.state_dict())


def test_steps_follow_what_is_changed_between_them() -> None:
    net, twin = nets()
    ours, theirs = (torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, twin))
    step, graphs = captured(ours.step)
    for seed in range(6):
        gradients(net, seed)
        gradients(twin, seed)
        for optimizer, model in ((ours, net), (theirs, twin)):
            if seed == 2:
                optimizer.param_groups[0]["lr"] = 0.1
            if seed == 3:
                model[0].weight.grad = None
            if seed == 4:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1.0})
                optimizer.param_groups[1]["params"][0].grad = torch.ones(2)
        step()
        theirs.step()
        for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
            for p, q in zip(a["params"], b["params"], strict=True):
                torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_hooks_of_an_optimizer_run() -> None:
    net, _ = nets()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step, _ = captured(optimizer.step)
    gradients(net, 0)
    step()
    step()
    assert seen == ["before", "after"] * 2


def test_a_learning_rate_schedule() -> None:
    net, twin = nets()
    pairs = []
    for n in (net, twin):
        optimizer = torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9)
        pairs.append((n, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)))
    step, _ = captured(pairs[0][1].step)
    for seed in range(7):
        for n, optimizer, schedule in pairs:
            gradients(n, seed)
            (step if n is net else optimizer.step)()
            schedule.step()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "AdamW foreach"])
def test_a_whole_training_step(name: str) -> None:
    """Forward, backward and the optimizer's step are one graph: the first step's, and that of all others."""
    torchdynamo.reset()
    net, twin = nets()
    ours, theirs = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](twin.parameters())

    def train(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, graphs = captured(train)
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(5, 4, dtype=torch.float64)
        torch.testing.assert_close(step(net, ours, x), train(twin, theirs, x), rtol=1e-12, atol=1e-12)
        if seed == 2:
            after_three = len(graphs)
    assert len(graphs) == after_three == 2
    assert not torchdynamo.stats().break_details
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_fused_step_under_a_gradient_scaler_breaks() -> None:
    torchdynamo.reset()
    net, twin = nets()
    ours, theirs = (torch.optim.SGD(n.parameters(), lr=0.1, fused=True) for n in (net, twin))
    step, _ = captured(ours.step)
    for seed in range(3):
        for one, optimizer in ((net, ours), (twin, theirs)):
            gradients(one, seed)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(seed == 1))
        step()
        theirs.step()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert {b.reason for b in torchdynamo.stats().break_details} == {"operator_without_meta"}


def test_what_keeps_another_compiler_out_does_not_keep_capture_out() -> None:
    @torch.compile(backend="eager")
    def other(x):  # torch.compile marks methods of all optimizers when it is first used
        return x + 1

    other(torch.ones(1))
    net, twin = nets()
    ours, theirs = (torch.optim.Adam(n.parameters(), lr=0.1) for n in (net, twin))
    step, _ = captured(ours.step, fullgraph=True)
    gradients(net, 0)
    gradients(twin, 0)
    step()
    theirs.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
