"""Results, gradients and written inputs share memory where eager's do, and nowhere else.

More of them: `pytest packages/aotautograd/tests/test_aotautograd_shared_memory.py --programs 2000`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared_programs import Kept, differences, draw, observe, relation

from aotautograd import aot_function, run_graph
from aotautograd.schemas import Opset


def as_it_is(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm


COMPILERS: dict[str, tuple[Callable[..., Any], Opset | None]] = {
    "graph": (as_it_is, None),
    "boxed graph": (run_graph, None),
    "prims": (as_it_is, "prims"),
    "core_aten": (as_it_is, "core_aten"),
}


@pytest.mark.parametrize("compiler", sorted(COMPILERS))
def test_random_programs(compiler: str, request: pytest.FixtureRequest) -> None:
    function, opset = COMPILERS[compiler]
    first = random.randrange(1 << 30)
    for seed in range(first, first + (request.config.getoption("--programs") or 25)):
        drawn = draw(seed)
        try:
            eager = observe(drawn, drawn, seed)
        except RuntimeError:
            continue  # no program of eager's
        compiled = aot_function(drawn, fw_compiler=function, decompositions=opset)
        found = differences(eager, observe(compiled, drawn, seed))
        assert not found, f"draw({seed}) = {drawn}\n" + "\n".join(found)


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, requires_grad=True)


def sum_of_views(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.view(4) + y.view(4)).sin()


def sum_with_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.view(4) + y).sin()


def plain_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y).sin()


def equal_work(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.ones(3, *x.shape, dtype=x.dtype)
    return (z * x + z * y).sin()


def given_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y.view(x.shape)


def handed_on(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Autograd takes the view first, and then the gradient itself, which nobody else holds any more."""
    return (Kept.apply(x) + y.view(x.shape)) * 2


def handed_on_last(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y.view(x.shape) + Kept.apply(x)) * 2


@pytest.mark.parametrize("compiler", sorted(COMPILERS))
@pytest.mark.parametrize(
    ("program", "shapes", "after_backward", "asked_for"),
    [
        (sum_of_views, ((2, 2), (2, 2)), "meet", "meet"),
        (sum_with_view, ((2, 2), (4,)), None, "meet"),
        (plain_sum, ((4,), (4,)), None, "same object"),
        (equal_work, ((4,), (4,)), None, None),
        (given_gradient, ((2, 2), (4,)), None, "meet"),
        (handed_on, ((2, 2), (4,)), "meet", "meet"),
        (handed_on_last, ((2, 2), (4,)), None, "meet"),
    ],
)
def test_gradients(
    compiler: str, program: Callable[..., torch.Tensor], shapes: Any, after_backward: str | None, asked_for: str | None
) -> None:
    """What eager does is stated, so that a change of eager's shows."""
    function, opset = COMPILERS[compiler]
    for f in (program, aot_function(program, fw_compiler=function, decompositions=opset)):
        inputs = [leaf(*s) for s in shapes]
        f(*inputs).sum().backward()
        expected = {after_backward} - {None} if program is not given_gradient else set()
        assert {how for _, _, how in relation([t.grad for t in inputs])} == expected
        gradients = torch.autograd.grad(f(*inputs).sin().sum(), inputs)
        assert {how for _, _, how in relation(gradients)} == {asked_for} - {None}


def test_a_tangent_is_handed_on() -> None:
    """A gradient that is the gradient of the result: a copy where the caller keeps that one."""
    x, y = leaf(3), leaf(3)
    compiled = aot_function(lambda a, b: a + b, fw_compiler=run_graph)
    tangent = torch.ones(3, dtype=torch.float64)
    compiled(x, y).backward(tangent)
    assert relation([tangent, x.grad, y.grad]) == []
    tangent.zero_()
    x.grad.mul_(2)  # type: ignore[union-attr]
    assert y.grad.tolist() == [1.0, 1.0, 1.0]  # type: ignore[union-attr]


class TwoResults(torch.autograd.Function):
    """Its derivative adds zeros for a gradient that is missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x + 1, x + 2

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return a + b


def one_and_view(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((x + y.view(x.shape)).view(4) + y,)


def sum_of_all(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x + y.view(x.shape)
    return z + 1, z.view(4) * z.view(4), z * 2


def one_added(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(TwoResults.apply(x))


def views_added(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(TwoResults.apply(x + y.view(x.shape)))


def views_of_sum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x + y.view(x.shape) + y.view(x.shape)
    return z.view_as(z), z.view_as(z)


@pytest.mark.parametrize("compiler", sorted(COMPILERS))
@pytest.mark.parametrize("program", [one_and_view, sum_of_all, one_added, views_added, views_of_sum])
def test_missing_gradients_share_nothing_else(compiler: str, program: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """Gradients of one output lie in one memory, or in that of the output's gradient, only where eager's do."""
    function, opset = COMPILERS[compiler]
    compiled = aot_function(program, fw_compiler=function, decompositions=opset)
    for place in range(len(program(leaf(2, 2), leaf(4)))):
        related = []
        for f in (program, compiled):
            inputs = [leaf(2, 2), leaf(4)]
            output = f(*inputs)[place]
            tangent = torch.ones_like(output)
            output.backward(tangent, retain_graph=True)
            asked_for = torch.autograd.grad(output, inputs, tangent, allow_unused=True)
            kept = {(i, j) for i, j, _ in relation([tangent, *(t.grad for t in inputs)])}
            related.append((kept, {(i, j) for i, j, _ in relation([tangent, *asked_for])}))
        assert all(ours <= eager for eager, ours in zip(*related, strict=True))


SEVERAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sine": torch.sin,
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "sort": lambda x: x.sort()[0],
    "sorted places": lambda x: x.sort()[1],
    "largest": lambda x: x.max(1).values,
    "deviation": lambda x: torch.std_mean(x, 1)[0],
    "pooled": lambda x: torch.nn.functional.max_pool1d(x, 2, return_indices=True)[0],
}


@pytest.mark.parametrize("name", SEVERAL)
def test_results_of_equal_calls_are_apart(name: str) -> None:
    """Also where the operator gives several tensors, of which these are one."""
    call = SEVERAL[name]
    program = lambda x: (call(x), call(x), call(x).view(-1))
    found = aot_function(program, fw_compiler=lambda graph, inputs: graph)(torch.randn(4, 4, requires_grad=True))
    assert len({result.untyped_storage().data_ptr() for result in found}) == 3
