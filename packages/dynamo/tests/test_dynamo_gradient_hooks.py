"""Hooks on gradients that a captured program registers: they run where eager's do, and the graph goes on behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import torchdynamo
from torchdynamo.stats import TOTAL

Log = list[torch.Tensor]
Program = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Case:
    """A program over a net of three layers and a list that hooks may fill, and whether its graph ends at a hook."""

    make: Callable[[nn.Sequential, Log], Program]
    breaks: bool = False


def scaled(net: nn.Sequential, log: Log) -> Program:
    def program(x: torch.Tensor) -> Any:
        h = net[1](net[0](x))
        h.register_hook(lambda gradient: gradient * 2)
        return net[2](h)

    return program


def kept(net: nn.Sequential, log: Log) -> Program:
    def program(x: torch.Tensor) -> Any:
        h = net[1](net[0](x))
        h.register_hook(log.append)
        h.retain_grad()
        return net[2](h) * h.retains_grad, h

    return program


def used_before(net: nn.Sequential, log: Log) -> Program:
    """A hook sees what comes from uses before its registration, too; of two, the first one first."""

    def program(x: torch.Tensor) -> Any:
        h = net[0](x)
        a = h.sin()
        h.register_hook(lambda gradient: gradient * 2)
        h.register_hook(lambda gradient: gradient + 1)
        return net[2](a + h.cos())

    return program


def of_a_view(net: nn.Sequential, log: Log) -> Program:
    def program(x: torch.Tensor) -> Any:
        h = net[0](x)
        part = h[:, 1:]
        part.register_hook(lambda gradient: gradient * 2)
        return net[2](h.tanh()) * part.sum()

    return program


def of_a_leaf(net: nn.Sequential, log: Log) -> Program:
    def program(x: torch.Tensor) -> Any:
        x.register_hook(lambda gradient: gradient * 2)
        if not log:
            net[0].bias.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))  # type: ignore[arg-type, operator]
        return net(x)

    return program


def reads_state_late(net: nn.Sequential, log: Log) -> Program:
    """What a hook reads is what there is when the backward comes to it."""
    state = {"calls": 0}

    def program(x: torch.Tensor) -> Any:
        state["calls"] += 1

        def hook(gradient: torch.Tensor, then: int = state["calls"]) -> torch.Tensor:
            return gradient * state["late"] + then

        h = net[0](x)
        h.register_hook(hook)
        out = net[2](h.tanh())
        state["late"] = 10 * state["calls"]
        return out

    return program


def written_later(net: nn.Sequential, log: Log) -> Program:
    """The hook stays with what the tensor was before the write."""

    def program(x: torch.Tensor) -> Any:
        h = net[0](x)
        h.register_hook(lambda gradient: gradient * 2)
        h.mul_(3)
        return net[2](h.tanh())

    return program


def base_written_later(net: nn.Sequential, log: Log) -> Program:
    def program(x: torch.Tensor) -> Any:
        h = net[0](x)
        part = h[:, 1:]
        part.register_hook(lambda gradient: gradient * 2)
        h.mul_(2)
        return net[2](h.tanh()) * part.sum()

    return program


def removed(net: nn.Sequential, log: Log) -> Program:
    def program(x: torch.Tensor) -> Any:
        h = net[0](x)
        handle = h.register_hook(lambda gradient: gradient * 2)
        out = net[2](h.tanh())
        handle.remove()
        return out

    return program


def differentiated_within(net: nn.Sequential, log: Log) -> Program:
    def program(x: torch.Tensor) -> Any:
        h = net[1](net[0](x))
        h.register_hook(lambda gradient: gradient * 2)
        out = net[2](h)
        (gradient,) = torch.autograd.grad(out.sum(), h, create_graph=True)
        return (out * gradient.sum()).sum()

    return program


def without_history(net: nn.Sequential, log: Log) -> Program:
    def program(x: torch.Tensor) -> Any:
        with torch.no_grad():
            h = net[0](x)
        try:
            h.register_hook(lambda gradient: gradient)
        except RuntimeError:
            return net[2](h) * 2
        return net[2](h)

    return program


CASES = {
    case.make.__name__: case
    for case in (
        *map(Case, (scaled, kept, used_before, of_a_view, of_a_leaf, reads_state_late)),
        *(
            Case(make, True)
            for make in (written_later, base_written_later, removed, differentiated_within, without_history)
        ),
    )
}


def run(case: Case, compiles: Callable[[Program], Program]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, log = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(), []
    program = compiles(case.make(net, log))
    found: list[torch.Tensor] = []
    for rows in (3, 3, 4, 5):
        x = torch.linspace(0, 1, rows * 4, dtype=torch.float64).view(rows, 4).requires_grad_()
        net.zero_grad()
        outs = program(x)
        outs = outs if isinstance(outs, tuple) else (outs,)
        outs[0].sum().backward()
        gradients = [x.grad, *(p.grad for p in net.parameters()), *(out.grad for out in outs if out.retains_grad)]
        found += [t.detach().clone() for t in (*outs, *gradients, *log) if t is not None]
    return found


@pytest.mark.parametrize("name", CASES)
def test_hooks_run_where_eagers_do(name: str) -> None:
    case = CASES[name]
    wanted = run(case, lambda program: program)
    found = run(case, torchdynamo.optimize(lambda graph, inputs: graph.forward))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert any("break" in str(event.kind.effect.value) for event in TOTAL.events) == case.breaks
