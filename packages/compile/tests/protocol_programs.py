"""Programs to train by every protocol: random nets, and the public models of the benchmarks.

A program is a module in float64 and its batches. Public models are named suite/name; random nets are net/SEED.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, BATCH = 8, 4
SIDE = 64  # of an image, in pixels; larger where the model takes none so small
BENCH = Path(__file__).parents[3] / "tools" / "bench"


@dataclass(frozen=True)
class Program:
    """`batch(step)` gives positional and keyword arguments, the same for the same step."""

    name: str
    module: nn.Module
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


def build(name: str, side: int = SIDE) -> Program:
    """The program of this name, its parameters the same each time."""
    suite, _, rest = name.partition("/")
    torch.manual_seed(0)
    if suite == "net":
        return _net(name, int(rest))
    return _public(name, suite, rest, side)


def public_names() -> list[str]:
    """The public models, the slowest first."""
    sys.path.insert(0, str(BENCH))
    from capture import SLOWEST, SUITES

    slowest = {f"{suite}/{name}" for suite, names in SLOWEST.items() for name in names.split()}
    names = [f"{suite}/{name}" for suite, listed in SUITES.items() for name in listed.split()]
    return sorted(names, key=lambda name: name not in slowest)


def _public(name: str, suite: str, model: str, side: int) -> Program:
    sys.path.insert(0, str(BENCH))
    import zoo

    module, args, kwargs = zoo.build(suite, model, train=True, batch=2, side=side, length=16)
    module = thinned(module, args, kwargs)

    def double(value: Any, step: int) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.double() + 0.01 * step

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(double(a, step) for a in args), {k: double(v, step) for k, v in kwargs.items()}

    return Program(name, module.double(), batch)


def thinned(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kept: int = 2) -> nn.Module:
    """A copy in which of neighbours with the same parameters' shapes `kept` are left, for memory and time: a protocol
    asks how blocks stand together, not how many there are. The module itself, if it does not run without them."""
    copied = copy.deepcopy(module)
    for parent in list(copied.modules()):
        if isinstance(parent, (nn.Sequential, nn.ModuleList)) and not _named_by_path(parent):
            stay: list[nn.Module] = []
            run: list[Any] = []  # shapes of the neighbours so far that are alike
            for block in parent:
                shapes = [(name, p.shape) for name, p in block.named_parameters()]
                run = [*run, shapes] if shapes in run else [shapes]
                if len(run) <= kept or not shapes:
                    stay.append(block)
            del parent[:]
            parent.extend(stay)
    try:
        with torch.no_grad():
            copied(*args, **kwargs)
    except Exception:
        return module
    return copied


def _named_by_path(parent: nn.Module) -> bool:
    """Children that have names in place of numbers are looked up by them."""
    return any(not name.isdigit() for name, _ in parent.named_children())


def _net(name: str, seed: int) -> Program:
    module = RandomNet(seed).double()

    def batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(1000 + step)
        return (torch.rand(BATCH, WIDTH, dtype=torch.float64, generator=generator),), {}

    return Program(name, module, batch)


class Doubled(torch.autograd.Function):
    """Gives its gradient on as a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (g + g).view_as(g)


class RandomNet(nn.Module):
    """Layers drawn from `LAYERS`, each of which reads one or two of the values so far (values are (BATCH, WIDTH))."""

    counter: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.linears[3].weight = self.linears[2].weight  # tied
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(2, WIDTH // 2))
        self.register_buffer("counter", torch.zeros(()))
        names = chance.sample(sorted(LAYERS), 5)
        self.plan = [
            (chance.choice(names), chance.randrange(8), chance.randrange(8)) for _ in range(chance.randint(3, 7))
        ]
        self.returned = chance.choice(("one", "tuple", "dict", "twice", "views"))

    def forward(self, x: torch.Tensor) -> Any:
        values = [self.linears[0](x)]
        for name, a, b in self.plan:
            values.append(LAYERS[name](self, values[-1 - a % len(values)], values[-1 - b % len(values)]))
        first, last = values[len(values) // 2], values[-1]
        match self.returned:
            case "one":
                return last
            case "tuple":
                return last, first
            case "dict":
                return {"last": last, "first": first.sum(), "none": None}
            case "twice":
                return last, last
            case _:
                return last[:2], last[2:].t()


Layer = Callable[[RandomNet, torch.Tensor, torch.Tensor], torch.Tensor]


def _count(net: RandomNet, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    net.counter.add_(1)
    return a * net.counter


def _breaks(net: RandomNet, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    print(end="")  # is not captured
    return a + b if float(a.detach().abs().sum()) < 1e6 else a


def _without_grad(net: RandomNet, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        largest = b.abs().amax()
    return a / (1 + largest)


def _written(net: RandomNet, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a.clone()
    c[:2] += b[2:]
    return c


LAYERS: dict[str, Layer] = {
    "linear": lambda net, a, b: net.linears[1](a),
    "tied": lambda net, a, b: net.linears[2](a).tanh() + net.linears[3](b),
    "both": lambda net, a, b: (net.linears[0](a) + net.linears[1](a)).sin(),
    "residual": lambda net, a, b: a + b,
    "norm": lambda net, a, b: net.norm(a),
    "batch_norm": lambda net, a, b: net.batch_norm(a),
    "product": lambda net, a, b: a * b.sigmoid(),
    "views": lambda net, a, b: a.view(2, -1).t().reshape(BATCH, WIDTH) + net.shift.view(-1),
    "parameters": lambda net, a, b: a + (net.scale + net.shift.view(-1)).sin(),
    "halves": lambda net, a, b: torch.cat(a.split(WIDTH // 2, 1)[::-1], 1),
    "softmax": lambda net, a, b: F.softmax(a, -1) @ b.t() @ b,
    "relu": lambda net, a, b: F.relu(a + 0.1 * b, inplace=True),
    "dropout": lambda net, a, b: F.dropout(a, 0.3, net.training),
    "count": _count,
    "breaks": _breaks,
    "without_grad": _without_grad,
    "written": _written,
    "detached": lambda net, a, b: a + b.detach(),
    "checkpoint": lambda net, a, b: checkpoint(lambda v: net.linears[1](v).exp().tanh(), a, use_reentrant=False),  # type: ignore[no-any-return]
    "function": lambda net, a, b: Doubled.apply(a) + b,  # type: ignore[no-any-return]
}
