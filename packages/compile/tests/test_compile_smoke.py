"""The whole stack in short, for every supported torch: each program runs compiled, nothing of it eagerly.

Models are in float64, so that a difference from eager is no rounding's but a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchcompile
import torchdynamo
from primtorch.ledger import total

pytestmark = pytest.mark.smoke
Tensors = tuple[torch.Tensor, ...]


class Square(torch.autograd.Function):
    """x*x with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@torch.library.custom_op("compile_smoke::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@tripled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


class Attention(nn.Module):
    """A block of a transformer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return F.cross_entropy((x + self.mlp(self.norms[1](x))).flatten(0, 1), tokens.flatten() % 16)


class Convolutions(nn.Module):
    """Convolution, batch norm with its running statistics, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            # A bias would have no gradient but rounding errors, which AdamW would scale up to whole steps.
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 4, 3, stride=2),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).flatten(1).softmax(1).square().sum()


class OwnFunction(nn.Module):
    """A custom autograd function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Square.apply(self.first(x))).sum()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def assert_compiled(graphs: int = 1, breaks: int = 0, recompiles: int = 0) -> None:
    """So many graphs, breaks and recompilations; generated kernels; nothing else ran eagerly, twice or differently."""
    report = torchcompile.report()
    assert report.kernels > 0, report
    found = (report.captured, total(report.breaks), total(report.recompiles))
    assert found == (graphs, breaks, recompiles), report
    assert not report.fallbacks and not report.reruns and not report.mended, report


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "attention": (Attention, lambda: torch.randint(50, (2, 7))),
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 10, 10, dtype=torch.float64)),
    "own function": (OwnFunction, lambda: torch.randn(3, 6, dtype=torch.float64)),
}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, optimizer: Any) -> None:
    """Three steps: values, gradients, statistics and updated parameters are eager's, from one graph."""
    make, draw = MODELS[name]
    eager = make().double()
    compiled = torchcompile.compile(copy.deepcopy(eager), fullgraph=True)
    steps = [optimizer(model.parameters(), lr=0.01) for model in (eager, compiled)]
    for _ in range(3):
        x = draw()
        losses = []
        for model, step in zip((eager, compiled), steps, strict=True):
            step.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
        close(losses[1], losses[0])
        close([p.grad for p in compiled.parameters()], [p.grad for p in eager.parameters()])
        for step in steps:
            step.step()
        close(compiled.state_dict(), eager.state_dict())
    assert_compiled()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_compiled_optimizer(optimizer: Any) -> None:
    """Its step is one graph from the third call on: state is made in the first."""
    models = [nn.Linear(4, 3).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [optimizer(model.parameters(), lr=0.1, foreach=False) for model in models]
    compiled = torchcompile.compile(steps[1].step)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(4):
        for model, step in zip(models, (steps[0].step, compiled), strict=True):
            model.zero_grad()
            model(x).square().sum().backward()
            step()
        close(models[1].state_dict(), models[0].state_dict())
    report = torchcompile.report()
    assert report.kernels and not report.ran_eagerly, report


@dataclass(frozen=True)
class Program:
    """A function, calls of it, and what they are compiled to."""

    function: Callable[..., Any]
    calls: tuple[Callable[[], Tensors], ...]
    graphs: int = 1
    breaks: int = 0
    recompiles: int = 0
    settings: tuple[tuple[str, Any], ...] = ()


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Callable[[], Tensors]:
    return lambda: (torch.randn(shape).to(dtype),)


def breaks_once(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() * 2
    torchdynamo.graph_break()
    return y.cos() + x


def writes(x: torch.Tensor) -> torch.Tensor:
    x[0].mul_(3)
    row = x[1]
    x.add_(1)
    return row.exp() + x.sum()


def loops(x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for index, row in enumerate(x.unbind(0)):
        try:
            found.append(row * index if index != 1 else row.view(7, 7))
        except RuntimeError:
            found.append(row.relu())
    return found


def mixed(x: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad():
        scale = x.amax(-1, keepdim=True)
    return {"scaled": (x / scale).to(torch.bfloat16), "order": x.argsort(-1), "kept": x[x[:, 0] * 0 == 0].shape}


PROGRAMS: dict[str, Program] = {
    "pointwise and reduction": Program(lambda x: (x.sin() * x.exp()).softmax(-1).sum(0), (draw(4, 6),)),
    "repeated calls": Program(lambda x: x.tanh() + 1, (draw(3, 5),) * 3),
    "another dtype compiles anew": Program(
        lambda x: x.square() - 1, (draw(4, 4), draw(4, 4, dtype=torch.int64)), graphs=2, recompiles=1
    ),
    "sizes that change become symbols": Program(
        lambda x: x.softmax(-1) @ x.transpose(0, 1), tuple(draw(n, 6) for n in (4, 5, 9, 17)), graphs=2, recompiles=1
    ),
    "dynamic sizes": Program(
        lambda x: F.layer_norm(x, x.shape[-1:]) * x.shape[0],
        tuple(draw(n, n + 3) for n in (4, 6, 11)),
        settings=(("dynamic", True),),
    ),
    "a break": Program(breaks_once, (draw(4, 4),) * 2, graphs=2, breaks=1),
    "writes to an input through views": Program(writes, (draw(3, 4),) * 2),
    "a loop with an exception": Program(loops, (draw(3, 4),)),
    "strided input": Program(lambda x: x.cumsum(0) + x.flip(1), (lambda: (torch.randn(6, 8).double().t()[::2],),)),
    "empty": Program(lambda x: (x + 1).sum(0), (draw(0, 4),)),
    "a scalar": Program(lambda x: (x * 2).reshape(1), (draw(),)),
    "an assertion of torch": Program(
        lambda x: (torch._assert(x.dim() == 2, "rows of columns"), x.sin())[1],
        (draw(3, 4),),
        settings=(("fullgraph", True),),
    ),
    "an operator defined in Python": Program(
        lambda x: tripled(x + 1).sin(), (draw(3, 4),), settings=(("fullgraph", True),)
    ),
    "full graph": Program(lambda x: F.gelu(x).mean(), (draw(5, 5),), settings=(("fullgraph", True),)),
}


@pytest.mark.expected_eager("graph_break")  # as many as the program says
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    program = PROGRAMS[name]
    compiled = torchcompile.compile(program.function, **dict(program.settings))
    for call in program.calls:
        given = call()
        kept = tuple(x.clone(memory_format=torch.preserve_format) for x in given)
        close(compiled(*given), program.function(*kept))
        close(given, kept)  # what it writes to them, too
    assert_compiled(program.graphs, program.breaks, program.recompiles)


def test_full_graph_refuses_breaks() -> None:
    compiled = torchcompile.compile(breaks_once, fullgraph=True)
    with pytest.raises(torchdynamo.Unsupported, match=r"test_compile_smoke\.py"):
        compiled(torch.ones(2, 2))


def test_autocast_and_dropout() -> None:
    """Reduced precision has eager's dtypes; random numbers have eager's moments and follow the seed."""
    layer = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        return y, F.dropout(torch.ones(200, 200), 0.25)

    compiled = torchcompile.compile(step, fullgraph=True)
    torch.manual_seed(3)
    y, kept = compiled(torch.randn(4, 8))
    assert y.dtype == torch.bfloat16 and y.requires_grad
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    torch.manual_seed(3)
    assert torch.equal(compiled(torch.randn(4, 8))[1], kept)
    assert_compiled()
