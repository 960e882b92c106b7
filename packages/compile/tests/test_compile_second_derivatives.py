"""Gradient penalties in training: values, which gradients there are at all, parameters and buffers are eager's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

import torchcompile
from aotautograd.errors import DoubleBackwardUnavailable

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.expected_eager()]


class Noisy(nn.Module):
    """Draws, and a value that it computes outside of autograd's history from a buffer that it then writes."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest * 0.9, x.abs().amax()))
            scale = self.largest.rsqrt()
        return x.sin() * scale * torch.randn_like(x)


class Twice(nn.Module):
    """The same value within history and outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            norm = x.square().sum(1, keepdim=True)
        return x * norm + x.square().sum(1, keepdim=True) * x.detach()


class Detached(nn.Module):
    """A value that loses its history when it has been used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y + 1
        y.detach_()
        return z.sin() + y * x


class Scaled(torch.autograd.Function):
    """Its backward is not the derivative of its forward, and reads the argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x.sin() * x


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g


class Jittered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g


class Applying(nn.Module):
    def __init__(self, function: Any, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.behind = function, behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.function.apply(x))


class WrittenUnderNoGrad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        with torch.no_grad():
            y.mul_(0.5)
        return y.sin()


NETS: dict[str, Callable[[], nn.Module]] = {
    "leaky": lambda: nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    "relu": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 1)),
    "dropouts": lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 8), nn.GELU(), nn.AlphaDropout(0.3), nn.Linear(8, 1)),
    "spectral": lambda: nn.Sequential(spectral_norm(nn.Linear(5, 8)), nn.ELU(), spectral_norm(nn.Linear(8, 1))),
    "spectral dropout": lambda: nn.Sequential(spectral_norm(nn.Linear(5, 8)), nn.Dropout(0.4), nn.SiLU(), nn.Linear(8, 1)),
    "parametrized": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.CELU(), nn.Linear(8, 1)),
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Linear(8, 1)),
    "layer norm": lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Mish(), nn.Linear(8, 1)),
    "noisy": lambda: nn.Sequential(nn.Linear(5, 8), Noisy(), nn.Linear(8, 1)),
    "twice": lambda: nn.Sequential(nn.Linear(5, 8), Twice(), nn.Linear(8, 1)),
    "rounded": lambda: nn.Sequential(nn.Linear(5, 8), Applying(Rounded, torch.sin), nn.Linear(8, 1)),
    "jittered": lambda: nn.Sequential(nn.Linear(5, 8), Applying(Jittered, torch.sin), nn.Linear(8, 1)),
    "function": lambda: nn.Sequential(nn.Linear(5, 8), Applying(Scaled, lambda y: y), nn.Linear(8, 1)),
    "kinks": lambda: nn.Sequential(nn.Linear(5, 8), nn.Hardtanh(), nn.PReLU(), nn.Linear(8, 8), nn.Hardswish(), nn.Linear(8, 1)),
}  # fmt: skip


def train(net: nn.Module, call: Callable[..., Any], seed: int) -> list[Any]:
    """Two steps with a penalty on the slope; what is seen after each."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    seen: list[Any] = []
    for _ in range(2):
        for penalty in (False, True):
            x = torch.randn(6, 5).requires_grad_()
            optimizer.zero_grad()
            score = call(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=penalty, retain_graph=True)
            loss = F.softplus(-score).mean() + (((slope.norm(2, 1) - 1) ** 2).mean() if penalty else 0)
            loss.backward()
            optimizer.step()
            gradients = [x.grad, *(p.grad for p in net.parameters())]
            seen += [score.detach(), slope.detach(), *gradients, *(t.clone() for t in net.state_dict().values())]
            x = torch.randn(6, 5).requires_grad_()
            optimizer.zero_grad()
            (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            slope.square().sum().backward()  # by the slope alone
            seen += [x.grad, *(p.grad for p in net.parameters())]
    return [t.clone() if isinstance(t, torch.Tensor) else t for t in seen]


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("name", NETS)
def test_penalties(name: str, backend: str) -> None:
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    net = NETS[name]()
    other = copy.deepcopy(net)
    options = {"eager_random": True} if backend == "inductor" else {}
    compiled = torchcompile.compile(other, backend=backend, options=options)
    expected, found = train(net, net, seed), train(other, compiled, seed)
    assert [t is None for t in found] == [t is None for t in expected], f"seed {seed}"
    for a, b in zip(found, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, msg=lambda m: f"seed {seed}: {m}")


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a write": lambda: nn.Sequential(nn.Linear(5, 8), WrittenUnderNoGrad(), nn.Linear(8, 1)),
    "detached in place": lambda: nn.Sequential(nn.Linear(5, 8), Detached(), nn.Linear(8, 1)),
}


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_history_that_is_not_the_operators_is_refused(name: str, backend: str) -> None:
    compiled = torchcompile.compile(REFUSED[name](), backend=backend)
    x = torch.randn(6, 5).requires_grad_()
    with pytest.raises(DoubleBackwardUnavailable, match="history") as caught:
        torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    assert __file__ in str(caught.value)


def rotated_row(x: torch.Tensor) -> torch.Tensor:
    y = torch.complex(x, x.sin())
    y[:, 1] *= 1j * x[:, -2]
    return torch.abs(y)


# Their first derivatives have operators that autograd cannot pass, or not with all of their history.
OTHER_OPERATORS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "group norm without weights": lambda: nn.GroupNorm(2, 4, affine=False),
    "group norm of constants": lambda: nn.GroupNorm(4, 4).requires_grad_(False),
    "group norm by its weight": lambda: lambda x: F.group_norm(torch.arange(24).reshape(3, 4, 2).sin(), 2, x[0, :, 0]),
    "instance norm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "gru": lambda: lambda x, gru=nn.GRU(5, 3): gru(x)[0],  # type: ignore[misc]
    "circular": lambda: nn.CircularPad1d(2),
    "written": lambda: lambda x: torch.zeros(3, 4, 5).copy_(x[:, :1]).mul_(x),
    "logit": lambda: lambda x: x.sigmoid().logit(),
    "logit within": lambda: lambda x: x.sigmoid().logit(0.3),
    "softsign": nn.Softsign,
    "norm": lambda: lambda x: F.normalize(x, 1.0, 1),
    "irfft": lambda: lambda x: torch.fft.irfft(torch.complex(x, x.cos())),
    "a row is written": lambda: rotated_row,
    "channels": lambda: nn.Dropout1d(0.5),
    "det": lambda: lambda x: torch.linalg.det(x[..., :4]),
    "det of columns": lambda: lambda x: torch.linalg.det(x[..., :4].mT.contiguous().mT),
    "slogdet": lambda: lambda x: torch.linalg.slogdet(x[..., :4].contiguous()).logabsdet,
    "solve": lambda: lambda x: torch.linalg.solve(x[..., :4].contiguous(), x),
    "solve complex": lambda: lambda x: torch.linalg.solve(torch.complex(x, x.sin())[..., :4], x + 0j, left=True).abs(),
}  # fmt: skip


def two_derivatives(call: Callable[..., Any], given: list[torch.Tensor], seed: int) -> list[torch.Tensor | None]:
    torch.manual_seed(seed)
    slopes = torch.autograd.grad(call(given[0]).tanh().square().sum(), given, create_graph=True)
    penalty = torch.stack([g.sin().sum() for g in slopes if g.requires_grad]).sum()
    return [*slopes, *torch.autograd.grad(penalty, given, allow_unused=True)]


@pytest.mark.parametrize(
    ("name", "backend", "dynamic"),
    [
        *((name, "aot_eager", dynamic) for name in OTHER_OPERATORS for dynamic in (False, True)),
        *((name, "inductor", False) for name in ("group norm", "gru", "logit", "solve")),
    ],
)
def test_operators_for_which_autograd_takes_others(name: str, backend: str, dynamic: bool) -> None:
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    call = OTHER_OPERATORS[name]()
    weights = list(call.parameters()) if isinstance(call, nn.Module) else []
    given = [torch.randn(3, 4, 5).requires_grad_(), *(p for p in weights if p.requires_grad)]
    compiled = torchcompile.compile(call, backend=backend, dynamic=dynamic)
    found, expected = two_derivatives(compiled, given, seed), two_derivatives(call, given, seed)
    for a, b in zip(found, expected, strict=True):
        a, b = (torch.zeros(()) if t is None else t for t in (a, b))
        torch.testing.assert_close(a.expand_as(b), b, rtol=1e-7, atol=1e-9, msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_part_of_a_sum_that_is_laid_out_as_the_sum_has_derivatives(dynamic: bool) -> None:
    """Third derivatives of a recurrent net, in whose second ones parts of sums have no tangent."""
    seed = random.randrange(1 << 30)
    torch.manual_seed(seed)
    net, x = nn.GRU(5, 3), torch.randn(3, 4, 5).requires_grad_()

    def third(call: Callable[..., Any]) -> torch.Tensor:
        (slope,) = torch.autograd.grad(call(x)[0].tanh().square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.square().sum(), x)[0]

    found = third(torchcompile.compile(net, backend="aot_eager", dynamic=dynamic))
    torch.testing.assert_close(found, third(net), rtol=1e-7, atol=1e-9, msg=lambda m: f"seed {seed}: {m}")
