"""Autograd functions and checkpoints through the whole stack: one graph, gradients as in eager, activations not kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import torchcompile

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.warm]

BACKENDS = ("eager", "aot_eager", "inductor")


class Gate(Function):
    """Two results, saved inputs, results and attributes, a number among the arguments."""

    @staticmethod
    def forward(ctx, x, w, power):
        gate = torch.sigmoid(x @ w)
        ctx.save_for_backward(x, w, gate)
        ctx.power = power
        places = gate.argmax(-1)
        ctx.mark_non_differentiable(places)
        return gate**power * x, gate, places

    @staticmethod
    def backward(ctx, g, h, _):
        x, w, gate = ctx.saved_tensors
        inner = (g * x * ctx.power * gate ** (ctx.power - 1) + h) * gate * (1 - gate)
        gw = x.t() @ inner if ctx.needs_input_grad[1] else None
        return g * gate**ctx.power + inner @ w.t(), gw, None


class Clip(Function):
    """A straight-through estimator: its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class GivesBack(Function):
    """Of two tensors the first itself, with a derivative of its own."""

    @staticmethod
    def forward(ctx, x, w):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -3 * grad, grad.cos().sum(0)


class Views(GivesBack):
    @staticmethod
    def forward(ctx, x, w):
        return x.t()

    @staticmethod
    def backward(ctx, grad):
        return -3 * grad.t(), grad.cos().sum(1)


class WritesUnseen(GivesBack):
    """As solvers fill the stages of a step: behind the version counter's back."""

    @staticmethod
    def forward(ctx, x, w):
        x.data[0] = w
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[0].cos()


def given_back(f, x, w):
    return f(x, w.sin())


def given_back_beside_another(f, x, w):
    return f(x, w.sin()), w * 2


def given_back_twice(f, x, w):
    y = f(x, w.sin())
    return f(y.view_as(y), w.cos()), w * 2


def view_of_what_was_given_back(f, x, w):
    y = f(x, w.sin())
    return y[1:], x[2], y.sum() + w


def with_what_it_was_given(f, x, w):
    y = x * 2
    return y, f(y, w.sin())


def before_what_it_was_given(f, x, w):
    y = x * 2
    return f(y, w.sin()), y


def twice_of_one(f, x, w):
    y = x * 2
    z, v = f(y, w.sin()), f(y, w)
    return z.sin(), z, v[1:]


def views_of_one_that_is_given_back(f, x, w):
    y = f(x * 2, w.sin())
    return y, y[1:], w * 3


GIVING_BACK = [
    given_back, given_back_beside_another, given_back_twice, view_of_what_was_given_back, with_what_it_was_given,
    before_what_it_was_given, twice_of_one, views_of_one_that_is_given_back,
]  # fmt: skip


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "non-leaf"])
@pytest.mark.parametrize("function", [GivesBack, Views, WritesUnseen], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", GIVING_BACK, ids=lambda p: p.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_gives_back_what_it_was_given(backend, program, function, leaf):
    """Its derivative is its own, and no view's, though the result lies in the argument's memory."""
    seed = torch.seed()
    runs = []
    for run in (program, torchcompile.compile(program, backend=backend, fullgraph=True)):
        torch.manual_seed(seed)
        start, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        x = start if leaf else start * 1
        found = run(function.apply, x, w)
        results = found if isinstance(found, tuple) else (found,)
        (sum((y * y).sum() for y in results) + (x * 0).sum()).backward()
        shared = [
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            for a in (*results, x)
            for b in (*results, x)
        ]
        layouts = [(y.stride(), y.storage_offset(), y._version, y.requires_grad, y.grad_fn is None) for y in results]
        runs.append(([y.detach().clone() for y in (*results, x)], start.grad, w.grad, shared, layouts))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=1e-12, msg=lambda m: f"seed {seed}: {m}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_of_what_is_given_back(backend):
    def program(x, w):
        return GivesBack.apply(x, w.sin())

    runs = []
    for run in (program, torchcompile.compile(program, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        first = torch.autograd.grad(run(x, w).pow(3).sum(), (x, w), create_graph=True)
        runs.append((*first, *torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, w))))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=1e-12)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        y, gate, places = Gate.apply(x, self.weight, 3)
        return Clip.apply(self.out(y)) + gate.sum() + places.unsqueeze(-1)


def step(f: Any, model: nn.Module, x: torch.Tensor, seed: int = 0) -> tuple[Any, ...]:
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    value = f(x)
    value.square().sum().backward()
    return value.detach(), x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_functions_train(backend: str) -> None:
    torchcompile.reset()
    torch.manual_seed(0)
    model = Net()
    compiled = torchcompile.compile(model, backend=backend, fullgraph=True)
    for size in (3, 3, 5, 6):
        x = torch.randn(size, 4)
        torch.testing.assert_close(step(compiled, model, x), step(model, model, x))
    assert torchcompile.report().captured == 2
    model.weight.requires_grad_(False)
    torch.testing.assert_close(step(compiled, model, x), step(model, model, x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_of_an_autograd_function(backend: str) -> None:
    def program(x, w):
        return Gate.apply(x, w, 2)[0].sum()

    def penalty(f: Any) -> tuple[torch.Tensor, ...]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        grads = torch.autograd.grad(f(a, b), (a, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (a, b))

    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(penalty(torchcompile.compile(program, backend=backend)), penalty(program))


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x)).sin()))


class Deep(nn.Module):
    def __init__(self, p: float = 0.0, on: bool = True, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(p) for _ in range(4)])
        self.on, self.reentrant = on, reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_train(backend: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Deep(reentrant=reentrant)
    compiled = torchcompile.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        x = torch.randn(3, 8)
        torch.testing.assert_close(step(compiled, model, x), step(model, model, x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_with_dropout_is_differentiated_under_its_own_mask(backend: str) -> None:
    """The gradient along a direction equals the difference of two forwards drawn from one seed."""
    torch.manual_seed(0)
    model = Deep(p=0.5).double()
    compiled = torchcompile.compile(model, backend=backend, fullgraph=True)
    x, direction = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)

    def value(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return compiled(x).square().sum()

    a = x.clone().requires_grad_()
    value(a).backward()
    with torch.enable_grad():
        step = 1e-6 * direction
        difference = (value((x + step).requires_grad_()) - value((x - step).requires_grad_())).item() / 2e-6
    assert abs((a.grad * direction).sum().item() - difference) < 1e-5 * abs(difference)


def kept_bytes(f: Any, model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps, parameters and the input aside."""
    inputs = {p.data_ptr() for p in model.parameters()} | {x.data_ptr()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in inputs:
            kept[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive = f(x)
    del alive
    return sum(kept.values())


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_activations_of_a_checkpoint_are_not_kept(backend: str, partitioner: str) -> None:
    """Beside its input each region keeps nothing: no hidden layer, which is four times as wide."""
    x = torch.randn(64, 8, requires_grad=True)
    sizes = []
    for on in (True, False):
        model = Deep(on=on)
        compiled = torchcompile.compile(model, backend=backend, fullgraph=True, options={"partitioner": partitioner})
        compiled(x)
        sizes.append(kept_bytes(compiled, model, x))
    borders = 3 * 64 * 8 * x.element_size()
    assert sizes[0] <= borders
    assert sizes[1] > 4 * borders


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_parts_of_an_eager_checkpoint(backend: str, early_stop: bool) -> None:
    """Its hooks see what calls save, not what capture does; what they raise ends the recomputation."""
    torch.manual_seed(0)
    plain = Deep()
    compiled = copy.deepcopy(plain)
    torchcompile.reset()
    torchcompile.compile_in_place(*(m for m in compiled.modules() if isinstance(m, nn.Linear)), backend=backend)
    for _ in range(2):
        x = torch.randn(3, 8)
        with set_checkpoint_early_stop(early_stop):
            for model in (plain, compiled):
                model(x).sum().backward()
        for expected, found in zip(plain.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
    assert torchcompile.report().clean
