"""Outputs and gradients own their memory as eager's do, on every back end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared_programs import differences, draw, observe, relation
from torch import nn

import torchcompile


def custom(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Somebody's own back end."""
    return gm.forward


BACKENDS: dict[str, Any] = {"inductor": "inductor", "aot_eager": "aot_eager", "custom": custom}


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_random_programs(backend: str) -> None:
    first = random.randrange(1 << 30)
    for seed in range(first, first + 8):
        drawn = draw(seed)
        try:
            eager = observe(drawn, drawn, seed)
        except RuntimeError:
            continue  # no program of eager's
        compiled = torchcompile.compile(drawn.__call__, backend=BACKENDS[backend])
        found = differences(eager, observe(compiled, drawn, seed))
        assert not found, f"draw({seed}) = {drawn}\n" + "\n".join(found)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a(x) + self.b(x)).sin()


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_equal_gradients_of_two_parameters(backend: str) -> None:
    """Equal values, two tensors: what is done to one is not done to the other."""
    x, results = torch.rand(3, 4, dtype=torch.float64), []
    torch.manual_seed(0)
    model = TwoLayers().double()
    for run in (model, torchcompile.compile(model, backend=BACKENDS[backend])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        model.zero_grad()
        for _ in range(3):
            scaler.scale(run(x).sum()).backward()
        gradients = [p.grad for p in model.parameters()]
        assert relation(gradients) == []
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        results.append([norm, *(g.clone() for g in gradients if g is not None)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=0)


HOLOMORPHIC: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    *(getattr(torch, name) for name in "sigmoid tanh exp log sqrt rsqrt reciprocal sin cos tan asin atan sinh".split()),
    *(getattr(torch, name) for name in "cosh asinh acosh atanh log1p expm1 exp2 log2 log10 sinc square sgn".split()),
    torch.nn.functional.tanhshrink,
    torch.nn.functional.softsign,
    lambda x: x**3,
    lambda x: 2**x,
    lambda x: x.prod(),
    lambda x: x.cumprod(0),
)


@pytest.mark.parametrize("function", HOLOMORPHIC, ids=lambda f: f.__name__)
def test_gradients_of_complex_functions(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    start = torch.randn(7, dtype=torch.complex128) * 0.7

    def gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = start.clone().requires_grad_()
        torch.view_as_real(run(x)).sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(torchcompile.compile(function, fullgraph=True)), gradient(function))


def two_results_of_one(x, w):
    return (x @ w).tanh(), (x.sin() @ w).sum(-1)


def dropped(x, w):
    return (nn.functional.dropout(x @ w, 0.5, True),)


def convolved(x, w):
    return (nn.functional.conv2d(x.view(1, 1, 3, 4), w.view(1, 1, 4, 2)[:, :, :2]).flatten().softmax(0),)


def views_of_one(x, w):
    y = x @ w
    return y, y[1:]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [two_results_of_one, dropped, convolved, views_of_one], ids=lambda f: f.__name__)
def test_backwards_of_a_whole_batch_of_gradients(program, dynamic):
    """By `is_grads_batched` and by `torch.vmap`, which wrap tangents in tensors without memory; also one in another,
    with derivatives of them, and for some of the results."""
    seed = torch.seed()
    runs = []
    for run in (program, torchcompile.compile(program, options={"eager_random": True}, dynamic=dynamic)):
        torch.manual_seed(seed)
        x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4, 2)))
        results = run(x, w)
        tangents = [torch.randn(5, *y.shape, dtype=torch.float64) for y in results]
        batched = {"is_grads_batched": True, "retain_graph": True}
        found = [*torch.autograd.grad(results, (x, w), tangents, **batched)]
        found += torch.autograd.grad(results[:1], (x, w), tangents[:1], **batched)

        def by(tangent, y=results[0], x=x, w=w):
            return torch.autograd.grad(y, (x, w), tangent, retain_graph=True)

        found += torch.vmap(by)(tangents[0])
        found += torch.vmap(torch.vmap(by), in_dims=-1)(torch.stack([tangents[0], tangents[0] * 2], -1))
        firsts = torch.autograd.grad(results, (x, w), tangents, create_graph=True, **batched)
        found += [*firsts, *torch.autograd.grad(sum(g.pow(2).sum() for g in firsts), (x, w), retain_graph=True)]
        found += torch.autograd.grad(results, (x, w), [t[0] for t in tangents])
        runs.append(found)
    for expected, got in zip(*runs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"seed {seed}: {m}")


def test_the_jacobian_of_a_compiled_function_by_one_backward():
    def program(x):
        return (x**2).tanh()

    x = torch.randn(3, dtype=torch.float64)
    jacobians = [
        torch.autograd.functional.jacobian(f, x, vectorize=True) for f in (program, torchcompile.compile(program))
    ]
    torch.testing.assert_close(*jacobians)


def filled_by_item(buffer, w):
    buffer[0] = w * 2
    return buffer * w


def filled_through_a_view(buffer, w):
    rows = buffer[1:]
    rows.mul_(w)
    return buffer.sin()


def filled_by_a_mask(buffer, w):
    buffer[buffer > 0] = w.sum()
    return buffer * w


def filled_whole(buffer, w):
    buffer.copy_(w)
    return buffer.exp(), buffer


@pytest.mark.expected_eager("data_dependent_shape")
@pytest.mark.parametrize("order", ["plain first", "with a gradient first"])
@pytest.mark.parametrize(
    "program", [filled_by_item, filled_through_a_view, filled_by_a_mask, filled_whole], ids=lambda f: f.__name__
)
def test_a_buffer_that_comes_without_a_gradient_and_with_one(program, order, tmp_path):
    """It needs one behind the first write either way; what is compiled and kept for one is not for the other."""
    seed = torch.seed()
    comes_plain = [True, False, True] if order == "plain first" else [False, True, False]
    for _ in range(2):  # compiled, and from the cache
        compiled = torchcompile.compile(program, options={"cache": str(tmp_path)})
        for plain in comes_plain:
            runs = []
            for run in (program, compiled):
                torch.manual_seed(seed)
                w, start = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3,), (2, 3)))
                buffer = start.detach().clone() if plain else start * w
                found = run(buffer, w)
                results = found if isinstance(found, tuple) else (found,)
                sum(y.pow(2).sum() for y in results).backward()
                runs.append([*results, buffer, w.grad, start.grad])
            torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=1e-12, msg=lambda m: f"seed {seed}: {m}")
        torchcompile.reset()
