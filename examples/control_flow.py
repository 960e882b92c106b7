"""Control flow on data in compiled code: a selective state space model, and a neural ODE with steps of its own choice.

    python examples/control_flow.py

A block as in Mamba, whose state runs over the tokens by `scan`, in one graph for every length; and an ODE that is
solved by `while_loop` until its end is reached, with as many steps as the data needs. Both are trained: the gradients
are those of Python's own loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import torchcompile

Loop = Callable[..., Any]


def python_scan(step: Loop, state: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan` as a loop of Python."""
    outputs = []
    for row in zip(*rows, strict=True):
        state, output = step(state, row)
        outputs.append(output)
    return state, torch.stack(outputs)


def python_while_loop(condition: Loop, step: Loop, carry: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """`while_loop` as a loop of Python."""
    while condition(*carry):
        carry = step(*carry)
    return carry


class SelectiveStates(nn.Module):
    """A state space model whose decay, input and output depend on the token."""

    def __init__(self, run: Loop, width: int = 16, states: int = 8) -> None:
        super().__init__()
        self.run, self.states = run, states
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mix = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.select = nn.Linear(width, width + 2 * states)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, gate = self.enter(x).chunk(2, -1)
        inner = F.silu(self.mix(inner.mT)[..., : x.shape[1]].mT)
        rate, into, out = self.select(inner).split((x.shape[2], self.states, self.states), -1)
        rate = F.softplus(rate)

        def step(state: torch.Tensor, row: Any) -> tuple[torch.Tensor, torch.Tensor]:
            token, rate, into, out = row
            kept = torch.exp(-rate[..., None] * self.decay.exp())
            state = kept * state + (rate * token)[..., None] * into[:, None]
            return state, (state * out[:, None]).sum(-1)

        start = torch.zeros(x.shape[0], *self.decay.shape, dtype=x.dtype)
        _, rows = self.run(step, start, tuple(part.transpose(0, 1) for part in (inner, rate, into, out)))
        return self.leave(rows.transpose(0, 1) * F.silu(gate))  # type: ignore[no-any-return]


class Flow(nn.Module):
    """Follows a field from time 0 to 1 by Heun's method, with steps as long as its error estimate allows."""

    def __init__(self, run: Loop, width: int = 4) -> None:
        super().__init__()
        self.run = run
        self.field = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(at: torch.Tensor, length: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
            length = torch.minimum(length, 1 - at)
            first = self.field(state)
            second = self.field(state + length * first)
            error = (length * (second - first)).detach().abs().amax() / 2
            taken = error < 1e-2
            wanted = length * (0.9 * (1e-2 / (error + 1e-12)).sqrt()).clamp(0.2, 2.0)
            moved = state + length / 2 * (first + second)
            return torch.where(taken, at + length, at + 0), wanted, torch.where(taken, moved, state)

        start = (torch.zeros((), dtype=x.dtype), torch.full((), 0.1, dtype=x.dtype), x)
        return self.run(lambda at, length, state: at < 1, step, start)[2]  # type: ignore[no-any-return]


def of_a_step(model: nn.Module, call: Loop, x: torch.Tensor) -> list[torch.Tensor]:
    """The loss of a training step, and the gradients of the weights."""
    model.zero_grad()
    loss = call(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def milliseconds(run: Callable[[], Any], rounds: int = 5) -> float:
    run()
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    return (time.perf_counter() - began) / rounds * 1e3


def compared(
    name: str, make: Callable[[Loop], nn.Module], loops: tuple[Loop, Loop], inputs: list[torch.Tensor]
) -> None:
    torchcompile.reset()
    ours, python = make(loops[0]).double(), make(loops[1]).double()
    python.load_state_dict(ours.state_dict())
    compiled = torchcompile.compile(ours, fullgraph=True, dynamic=True)
    for x in inputs:
        torch.testing.assert_close(of_a_step(ours, compiled, x), of_a_step(python, python, x))
    assert torchcompile.report().clean and torchcompile.report().captured == 1, torchcompile.report()
    x = inputs[-1]
    times = [milliseconds(partial(of_a_step, *called, x)) for called in ((python, python), (ours, compiled))]
    print(f"{name}: one graph for {len(inputs)} inputs; a step in Python {times[0]:.1f} ms, compiled {times[1]:.1f} ms")


def main() -> None:
    torch.manual_seed(0)
    tokens = [torch.randn(2, length, 16).double() for length in (8, 12, 48)]
    compared("selective states", SelectiveStates, (scan, python_scan), tokens)
    points = [torch.randn(batch, 4).double() * 2 for batch in (3, 5, 64)]
    compared("neural ODE", Flow, (while_loop, python_while_loop), points)


if __name__ == "__main__":
    main()
