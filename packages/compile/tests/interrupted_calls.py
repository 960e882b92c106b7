"""Ctrl-C at random times, in compilations and in calls: `python interrupted_calls.py SECONDS SEED`.

Whatever was interrupted, the calls after it are right, nothing of the process's state has changed, and no graph is left
to eager.
"""

from __future__ import annotations

import random
import signal
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed.tensor  # `assert_close` imports it when it is first asked, which nothing is to interrupt
from torch import Tensor, nn
from torch.nn import functional as F

import torchcompile
from primtorch import ambient

DTYPE = torch.float64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.to(DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(F.gelu(self.inner(x)))
        with torch.no_grad():
            total = y.sum()
        with torch.autocast("cpu", enabled=False):
            y = y + total
        return self.outer(y)


def breaks(x: Tensor, log: list[float]) -> Tensor:
    y = x * 2
    log.append(float(y.sum()))
    return y.exp().sum(-1)


def plain(x: Tensor) -> Tensor:
    return (x.sin() @ x.mT).softmax(-1)


class Interrupted(KeyboardInterrupt):
    pass


class Calls:
    """What is compiled between two resets."""

    def __init__(self) -> None:
        torchcompile.reset()
        self.net = Net()
        self.compiled = [torchcompile.compile(f) for f in (self.net, breaks, plain)]

    def disturbed(self, action: int, x: Tensor) -> None:
        net, breaking, matrix = self.compiled
        match action:
            case 0:
                net(x)
            case 1:
                net(x.clone().requires_grad_()).square().sum().backward()
            case 2:
                breaking(x, [])
            case 3:
                matrix(x)
            case 4:
                torchcompile.compile(lambda x: F.dropout(x, 0.5).sum())(x)

    def check(self, x: Tensor) -> None:
        net, breaking, matrix = self.compiled
        same(net(x), self.net(x))
        same(matrix(x), plain(x))
        ours: list[float] = []
        eagers: list[float] = []
        same(breaking(x, ours), breaks(x, eagers))
        same(ours, eagers)
        leaves = [x.clone().requires_grad_(), *self.net.parameters()]
        found, expected = (torch.autograd.grad(f(leaves[0]).sum(), leaves) for f in (net, self.net))
        same(found, expected)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def main(seconds: float, seed: int) -> None:
    warnings.simplefilter("ignore")
    drawn, armed = random.Random(seed), [False]

    def interrupt(*_: object) -> None:
        if armed[0]:
            raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)
    before = ambient.snapshot()
    calls, hits, end = Calls(), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        if drawn.random() < 0.3:
            calls = Calls()
        x = torch.randn(drawn.choice((1, 2, 3, 5)), 6, dtype=DTYPE)
        delay, action = drawn.choice((0.005, 0.1, 0.6)) * max(drawn.random(), 1e-3), drawn.randrange(5)
        try:
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, delay)
                calls.disturbed(action, x)
            finally:
                armed[0] = False
        except Interrupted:
            hits += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack(), f"seed {seed}"
        assert not ambient.changed(before), f"seed {seed}: {ambient.changed(before)}"
        calls.check(x)
    print(f"{hits} interrupted")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
