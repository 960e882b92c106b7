"""Function transforms of torch.func inside of compiled functions: in the graph, with eager's values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchcompile

BACKENDS = ("eager", "aot_eager", "inductor")
pytestmark = pytest.mark.usefixtures("double")

Program = Callable[[torch.Tensor], Any]

# torch.func.jacrev of several results reads offsets from a tensor there.
READS_NUMBERS_OF_TENSORS = torch.__version__.startswith("2.11")


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


torch.manual_seed(0)
NET = _net()
WEIGHTS = {name: p.detach() for name, p in NET.named_parameters()}
NORMED = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).double()
SCALE = [2.0]


def _scaled(t: torch.Tensor) -> torch.Tensor:
    return (t * SCALE[0]).sin().sum()


MADE_OUTSIDE = torch.vmap(torch.func.grad(_scaled))
JACOBIAN_MADE_OUTSIDE = torch.func.jacrev(lambda t: t * SCALE[0])


def _fit(weights: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.func.functional_call(NET, weights, (x,)) - x[..., :2]).square().mean()


def per_sample_gradients(x: torch.Tensor) -> Any:
    return torch.vmap(torch.func.grad(lambda w, row: _fit(w, row[None])), in_dims=(None, 0))(WEIGHTS, x)


def gradient_through_an_inner_step(x: torch.Tensor) -> Any:
    def after_a_step(weights: Any) -> torch.Tensor:
        slopes = torch.func.grad(_fit)(weights, x)
        return _fit({name: w - 0.1 * slopes[name] for name, w in weights.items()}, x)

    return torch.func.grad(after_a_step)(WEIGHTS)


def two_pullbacks(x: torch.Tensor) -> Any:
    (value, total), pull = torch.func.vjp(lambda a: (a.sin(), a.sum()), x)
    return pull((torch.ones_like(value), total)), pull((value, total * 2))


def pullback_under_vmap(x: torch.Tensor) -> Any:
    _, pull = torch.func.vjp(lambda a: a.sin().sum(0), x)
    return torch.vmap(pull)(torch.eye(3, dtype=x.dtype))


def raising(x: torch.Tensor) -> Any:
    def function(t: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    try:
        return torch.func.grad(function)(x)
    except ValueError as error:
        return x * len(str(error))


def closing_over(x: torch.Tensor) -> Any:
    weight = x.exp()
    return torch.func.grad(lambda t: (t * weight).sum())(x)


def noting_inside(x: torch.Tensor) -> Any:
    seen: list[int] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.dim())
        return t.square().sum()

    return torch.func.grad(function)(x) * len(seen)


def under_no_grad(x: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.func.grad(lambda t: t.square().sum())(x)


def asking_inside(x: torch.Tensor) -> Any:
    """Whether arguments require gradients, by transform: code branches on it."""
    asked: list[bool] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        asked.extend((t.requires_grad, t.is_leaf, torch.is_grad_enabled()))
        return t.square().sum()

    torch.func.grad(function)(x)
    torch.vmap(function)(x)
    torch.func.jvp(function, (x,), (x,))
    torch.func.vjp(function, x)
    torch.func.jacrev(function)(x)
    torch.func.jacfwd(function)(x)
    with torch.no_grad():
        torch.func.grad(function)(x)
        torch.vmap(function)(x)
    return x * sum(2**place for place, answer in enumerate(asked) if answer)


def linearized(x: torch.Tensor) -> Any:
    """Two calls of one linear function, differentiated by its tangents."""
    scale = x.detach().cos()

    def function(a: torch.Tensor, b: dict[str, torch.Tensor]) -> Any:
        return {"u": a.sin() * b["b"] * scale, "v": a.sum(0)}

    primals = x.detach(), {"b": x.detach() * 2}
    value, push = torch.func.linearize(function, *primals)
    return value, push(x, {"b": x.square()}), push(x.exp(), primals[1])


IN_THE_GRAPH: dict[str, Program] = {
    "grad": lambda x: torch.func.grad(lambda t: (t.sin() * t).sum())(x),
    "grad with aux": lambda x: torch.func.grad(lambda t: (t.square().sum(), {"a": t.sin()}), has_aux=True)(x),
    "grad by two arguments": lambda x: torch.func.grad_and_value(
        lambda t, u: ((t * u).sum(), t + u), argnums=(0, 1), has_aux=True
    )(x, x.cos()),
    "grad by a dict": lambda x: torch.func.grad(lambda d: (d["a"] * d["b"]).sum())({"a": x, "b": x.cos()}),
    "grad with keywords": lambda x: torch.func.grad(lambda t, scale=1.0: (t * scale).sum())(x, scale=3.0),
    "grad of a constant": lambda x: torch.func.grad(lambda t: x.sum())(x),
    "grad through parameters": lambda x: torch.func.grad(lambda t: NET(t).square().sum())(x),
    "grad of grad": lambda x: torch.func.grad(lambda t: torch.func.grad(lambda u: u.pow(3).sum())(t).sum())(x),
    "vmap": lambda x: torch.vmap(lambda t: t.sin() + 1)(x),
    "vmap of a module": lambda x: torch.vmap(NET)(x),
    "vmap in and out": lambda x: torch.vmap(lambda a, b: (a * b, a.sum()), in_dims=(1, None), out_dims=(1, 0))(
        x, x[:, 0]
    ),
    "vmap with a number": lambda x: torch.vmap(lambda t, k: t * k, in_dims=(0, None))(x, 3),
    "vmap of vmap": lambda x: torch.vmap(torch.vmap(lambda t: t.sin() + x.sum()))(x),
    "vmap in chunks": lambda x: torch.vmap(lambda t: t.sin(), chunk_size=2)(x),
    "vmap in place": lambda x: torch.vmap(lambda t: t.clone().mul_(2).relu_())(x),
    "vmap of a write to its argument": lambda x: torch.vmap(lambda t: t.add_(1))(x.clone()),
    "vmap of views": lambda x: torch.vmap(lambda t: t.view(3, 1).expand(3, 2))(x),
    "vmap of where": lambda x: torch.vmap(lambda t: torch.where(t.sum() > 0, t, -t))(x),
    "vmap of numbers drawn": lambda x: torch.vmap(lambda t: torch.rand(3) * 0 + t, randomness="different")(x),
    "per-sample gradients": per_sample_gradients,
    "an inner step": gradient_through_an_inner_step,
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    "jvp with aux": lambda x: torch.func.jvp(lambda t: (t.sin(), t.cos()), (x,), (x,), has_aux=True),
    "vjp": two_pullbacks,
    "vjp under vmap": pullback_under_vmap,
    "linearize": linearized,
    "jacrev": lambda x: torch.func.jacrev(lambda a, b: {"u": a * b, "v": a.sum()}, argnums=(0, 1))(x[0], x[1]),
    "jacfwd": lambda x: torch.func.jacfwd(lambda t: t.sin().sum(0))(x),
    "hessian": lambda x: torch.func.hessian(lambda t: t.pow(3).sum())(x[0]),
    "made outside": lambda x: MADE_OUTSIDE(x),
    "a Jacobian made outside": lambda x: JACOBIAN_MADE_OUTSIDE(x[0]),
    "closing over": closing_over,
    "raising": raising,
    "effects inside": noting_inside,
    "under no_grad": under_no_grad,
    "questions inside": asking_inside,
}


def _printing(t: torch.Tensor) -> torch.Tensor:
    print(end="")
    return t.square().sum()


def writes_around(x: torch.Tensor) -> Any:
    total = torch.zeros_like(x)

    def function(t: torch.Tensor) -> torch.Tensor:
        total.add_(t.detach())
        return t.square().sum()

    return torch.func.grad(function)(x), total


def gives_the_pullback(x: torch.Tensor) -> Any:
    value, pull = torch.func.vjp(torch.sin, x)
    return value, pull


BREAKING: dict[str, tuple[Program, tuple[str, ...]]] = {
    "a break inside": (lambda x: torch.func.grad(_printing)(x), ()),
    "a number inside": (lambda x: torch.func.grad(lambda t: t.sum() * float(t.detach().sum()))(x), ()),
    "a write to what was made before": (writes_around, ()),
    "a write to a buffer": (lambda x: torch.func.grad(lambda t: NORMED(t).square().sum())(x), ()),
    "a checkpoint inside": (
        lambda x: torch.func.grad(lambda t: checkpoint(torch.sin, t, use_reentrant=False).sum())(x), (),
    ),
    "linearize at what requires a gradient": (lambda x: torch.func.linearize(torch.sin, x)[1](x), ()),
    "numbers drawn where vmap forbids it": (lambda x: torch.vmap(lambda t: t + torch.rand(3))(x), ()),
    "no scalar": (lambda x: torch.func.grad(lambda t: t * 2)(x), ()),
    "a pullback that is returned": (gives_the_pullback, ("rebuild", "unsplit_frame")),
}  # fmt: skip


def outcome(program: Program, size: int) -> Any:
    """The results, their strides, and the gradients by the input and the parameters; or the error."""
    NORMED[1].reset_running_stats()  # type: ignore[operator]
    torch.manual_seed(size)
    x = torch.randn(size, 3, requires_grad=True)
    try:
        leaves = pytree.tree_leaves(program(x))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    if callable(leaves[-1]) and not isinstance(leaves[-1], torch.Tensor):
        leaves[-1:] = leaves[-1](torch.ones_like(leaves[0]))
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    by = [x, *NET.parameters()]
    total: Any = sum(leaf.sum() for leaf in floats)
    gradients = torch.autograd.grad(total, by, allow_unused=True) if floats else ()
    strides = [leaf.stride() for leaf in leaves]
    return leaves, strides, [g if g is not None else "none" for g in gradients], NORMED[1].running_mean


def compare(program: Program, backend: str) -> None:
    compiled = torchcompile.compile(program, backend=backend)
    for call, size in enumerate((4, 4, 5)):
        SCALE[0] = 2.0 + call
        found, wanted = outcome(compiled, size), outcome(program, size)
        found, wanted = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
            else:
                assert ours == theirs


@pytest.mark.expected_eager(*(["function_transform"] * READS_NUMBERS_OF_TENSORS))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", IN_THE_GRAPH)
def test_a_transform_is_part_of_the_graph(name: str, backend: str) -> None:
    compare(IN_THE_GRAPH[name], backend)
    breaks = name == "jacrev" and READS_NUMBERS_OF_TENSORS
    assert torchcompile.report().clean or name == "raising" or breaks


@pytest.mark.parametrize("made", [torch.vmap, lambda f: torch.func.grad(lambda t: f(t).sum()), torch.func.jacrev])
def test_what_a_transform_gave_is_compiled_itself(made: Callable[[Program], Program]) -> None:
    compare(made(lambda t: (t * SCALE[0]).sin()), "aot_eager")
    assert torchcompile.report().clean


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.expected_eager("function_transform", *BREAKING[n][1])) for n in BREAKING],
)
def test_what_a_transform_cannot_hold_breaks_the_graph(name: str) -> None:
    compare(BREAKING[name][0], "aot_eager")
    assert {event.kind.id for event in torchcompile.report().breaks} <= {"function_transform", *BREAKING[name][1]}
    assert torchcompile.report().breaks
