"""Peak memory of a training step on CPU: at most eager's, whatever the model looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import torchcompile


class Tokens(nn.Module):
    """A table that is read six times and is the last layer too: its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(500, 32), nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = sum(self.table(ids.roll(k)) for k in range(6))
        return self.norm(hidden) @ self.table.weight.t()


class Chain(nn.Module):
    """Cheap layers between matrix products: each value follows from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(6))
        self.scale = nn.ParameterList(torch.ones(32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, scale in zip(self.up, self.down, self.scale, strict=True):
            x = (x + down(up(x).relu())) * scale + scale
        return x


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Conv2d(3, 64, 8, 8), nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embed(x).flatten(2).transpose(1, 2).contiguous())


class Dense(nn.Module):
    """Every layer reads what all layers before it gave, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, 8, 3, padding=1)) for n in range(16, 80, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1).mean((2, 3))


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "tied table": (Tokens, lambda: torch.randint(0, 500, (4, 32))),
    "chain": (Chain, lambda: torch.randn(4, 32, 32)),
    "patches": (Patches, lambda: torch.randn(2, 3, 64, 64)),
    "dense": (Dense, lambda: torch.randn(2, 3, 64, 64)),
    "convolutional": (convolutional, lambda: torch.randn(2, 3, 32, 32)),
}


def peak_of_step(model: Callable[..., Any], parameters: list[nn.Parameter], x: torch.Tensor) -> int:
    """Bytes above what is held before the third step, whose gradients begin as None."""

    def step() -> None:
        model(x).float().square().mean().backward()

    def prepare() -> None:
        for p in parameters:
            p.grad = None

    return peak_of(step, prepare)


def peak_of_inference(model: Callable[..., Any], x: torch.Tensor) -> int:
    """Bytes above what is held before the third call."""
    with torch.no_grad():
        return peak_of(lambda: model(x), lambda: None)


def peak_of(step: Callable[[], object], prepare: Callable[[], None]) -> int:
    for _ in range(2):
        prepare()
        step()
    prepare()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    events = trace.profiler.kineto_results.events()
    now = peak = 0
    for _, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += change
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_peak_of_a_training_step_is_at_most_eagers(name: str, backend: str) -> None:
    make, example = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), example()
    parameters = list(model.parameters())
    eager = peak_of_step(model, parameters, x)
    assert peak_of_step(torchcompile.compile(model, backend=backend), parameters, x) <= eager


@pytest.mark.parametrize("name", MODELS)
def test_peak_of_inference_is_at_most_eagers(name: str) -> None:
    make, example = MODELS[name]
    torch.manual_seed(0)
    model, x = make().eval(), example()
    eager = peak_of_inference(model, x)
    assert peak_of_inference(torchcompile.compile(model), x) <= eager


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_budget_keeps_less_and_gives_the_same(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Chain().double(), torch.randn(4, 32, 32, dtype=torch.float64)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().mean(), parameters)
    kept: list[int] = []
    for budget in (1, 0.5, 0):
        compiled = torchcompile.compile(model, backend=backend, options={"memory_budget": budget})
        out = compiled(x)
        kept.append(sum(t.nbytes for t in out.grad_fn.saved_tensors if not any(t is p for p in parameters)))
        for a, b in zip(expected, torch.autograd.grad(out.square().mean(), parameters), strict=True):
            torch.testing.assert_close(b, a)
    assert kept[0] > kept[1] > kept[2]
    assert kept[1] <= kept[0] // 2 + x.nbytes
    with pytest.raises(torchcompile.InvalidArgument, match="between 0 and 1"):
        torchcompile.compile(model, options={"memory_budget": 1.5})
