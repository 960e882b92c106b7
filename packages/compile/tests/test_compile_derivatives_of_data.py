"""Derivatives in Python that read data: those of an operator of the user's, as libraries write them for their experts.

A traced tensor has no data. The graph calls the operator's pullback, which runs the derivative as eager runs it. Where no
example tells which gradients it gives, the graph ends at the operator, told with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import torchcompile
from aotautograd import aot_function
from primtorch.errors import DataDependent
from primtorch.ledger import LEDGER

pytestmark = pytest.mark.warm

# How the ends of the groups are read.
WAYS: dict[str, Callable[[torch.Tensor], Sequence[Any]]] = {
    "tolist": lambda ends: ends.tolist(),
    "numpy": lambda ends: ends.numpy(),
    "asarray": lambda ends: np.asarray(ends),
    "item": lambda ends: [end.item() for end in ends],
    "int": lambda ends: list(map(int, ends)),
    "index": lambda ends: [range(100)[end] for end in ends],
}


def _grouped(read: Callable[[torch.Tensor], Sequence[Any]], name: str) -> Any:
    """x[start:end] @ weights[i] for each group of rows, as an operator with its derivative."""

    def compute(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out, start = x.new_zeros(x.size(0), weights.size(2)), 0
        for i, end in enumerate(ends.tolist()):
            out[start:end] = x[start:end] @ weights[i]
            start = end
        return out

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weights = ctx.saved_tensors
        of_x, of_weights, start = torch.zeros_like(x), torch.zeros_like(weights), 0
        for i, end in enumerate(read(ctx.ends)):
            of_x[start:end] = grad[start:end] @ weights[i].T
            of_weights[i] = x[start:end].T @ grad[start:end]
            start = end
        return of_x, of_weights, None

    def setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.ends = inputs[2]

    operator = torch.library.custom_op(f"derivatives_of_data::{name}", compute, mutates_args=())
    operator.register_fake(lambda x, weights, ends: x.new_empty(x.size(0), weights.size(2)))
    operator.register_autograd(backward, setup_context=setup)
    return operator


@pytest.fixture(scope="module")
def operators() -> Iterator[dict[str, Any]]:
    yield {way: _grouped(read, way) for way, read in WAYS.items()}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("way", WAYS)
def test_a_derivative_that_reads_data_runs_as_eager_runs_it(
    way: str, backend: str, dynamic: bool | None, operators: dict[str, Any]
) -> None:
    def program(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return operators[way]((x * 2).sin(), weights + 1, ends).cos().sum() + x.sum()  # type: ignore[no-any-return]

    compiled = torchcompile.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
    for ends in ([2, 5, 6], [0, 3, 6], [6, 6, 6], [1, 2, 6]):
        grads = []
        x, weights = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 3, 2, dtype=torch.float64)
        for run in (program, compiled):
            own = [t.clone().requires_grad_() for t in (x, weights)]
            run(*own, torch.tensor(ends)).backward()  # type: ignore[no-untyped-call]
            grads.append([t.grad for t in own])
        torch.testing.assert_close(*grads)
    assert not LEDGER.events


def both(program: Any, *inputs: torch.Tensor, fullgraph: bool = True) -> tuple[Any, Any]:
    """What `program(*own inputs)` gives in eager, and within a compiled function."""
    results = []
    for run in (program, torchcompile.compile(program, fullgraph=fullgraph)):
        own = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
        result = run(*own)
        results.append((result, torch.autograd.grad(result.square().sum(), own[:1], create_graph=True)[0], own))
    return results[0], results[1]


ENDS = torch.tensor([1, 4, 6])


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 3, 3, dtype=torch.float64)


def test_derivatives_of_derivatives(operators: dict[str, Any]) -> None:
    """To the third order, of an operator that is called three times, once with ends that are drawn."""
    group = operators["tolist"]

    def program(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        jitter = torch.rand(3).cumsum(0).mul(0).to(torch.int64) + ENDS
        return group(group(group(x.sin(), weights, ENDS).tanh(), weights, jitter), weights * 2, ENDS)  # type: ignore[no-any-return]

    found = []
    for _, gradient, own in both(program, *_inputs()):
        orders = [gradient]
        for _ in range(2):
            orders.extend(torch.autograd.grad(orders[-1].square().sum(), own, create_graph=True))
        found.append([t.detach() for t in orders])
    torch.testing.assert_close(*found)


def test_the_operator_runs_once_a_call() -> None:
    """Its derivative once as well; none of it for an argument that requires no gradient."""
    ran: list[object] = []

    @torch.library.custom_op("derivatives_of_data::counted", mutates_args=())
    def counted(x: torch.Tensor, y: torch.Tensor, end: torch.Tensor) -> list[torch.Tensor]:
        ran.append("forward")
        return [x * y, x[: int(end)].clone()]

    @counted.register_fake
    def _(x: torch.Tensor, y: torch.Tensor, end: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(x), x.new_empty(2)]

    def backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        if type(ctx.end) is torch.Tensor and not torch._is_functional_tensor(ctx.end):
            ran.append(("backward", ctx.needs_input_grad))
        of_x = grads[0] * y
        of_x = torch.cat([of_x[: int(ctx.end)] + grads[1], of_x[int(ctx.end) :]])
        return of_x, grads[0] * x if ctx.needs_input_grad[1] else None, None

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.end = inputs[2]

    counted.register_autograd(backward, setup_context=setup)
    end = torch.tensor(2)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product, part = counted(x.sin(), y, end)
        return product.sum() + part.exp().sum()

    seen = []
    x, y = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    for run in (program, torchcompile.compile(program, fullgraph=True)):
        for fixed in (False, True, True):
            own = x.clone().requires_grad_(), y.clone().requires_grad_(not fixed)
            ran.clear()
            run(*own).backward()  # type: ignore[no-untyped-call]
            seen.append(([t.grad for t in own], list(ran)))
    for eager, compiled in zip(seen[:3], seen[3:], strict=True):
        torch.testing.assert_close(eager[0], compiled[0])
        assert eager[1] == compiled[1]


def test_gradients_that_are_none_stay_none() -> None:
    @torch.library.custom_op("derivatives_of_data::one_sided", mutates_args=())
    def one_sided(x: torch.Tensor, y: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return x * int(end) + y

    one_sided.register_fake(lambda x, y, end: torch.empty_like(x))
    one_sided.register_autograd(
        lambda ctx, grad: (grad * int(ctx.end), None, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "end", inputs[2]),
    )
    gradients = []
    for run in (one_sided, torchcompile.compile(lambda x, y, end: one_sided(x, y, end), fullgraph=True)):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        run(x, y, torch.tensor(3)).sum().backward()
        gradients.append((x.grad, y.grad))
    assert gradients[0][1] is None and gradients[1][1] is None
    torch.testing.assert_close(gradients[0][0], gradients[1][0])


@pytest.mark.parametrize("wrong", [False, True])
def test_writes_to_results_and_arguments(wrong: bool, operators: dict[str, Any]) -> None:
    """A result that the derivative does not keep may be written; an argument that it keeps may not."""

    def program(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = x * 1
        result: torch.Tensor = operators["tolist"](x, weights, ENDS)
        (x if wrong else result).add_(1)
        return result.sin()

    if not wrong:
        eager, compiled = both(program, *_inputs())
        torch.testing.assert_close(eager[:2], compiled[:2])
        return
    messages = []
    for run in (program, torchcompile.compile(program)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            run(*(t.requires_grad_() for t in _inputs())).sum().backward()  # type: ignore[no-untyped-call]
        messages.append(caught.type)
    assert messages[0] is messages[1]


@pytest.mark.expected_eager("data_dependent_shape", "tensor_to_number", "library_code")
def test_a_derivative_that_reads_the_gradient_ends_the_graph() -> None:
    """No example tells what it does."""

    @torch.library.custom_op("derivatives_of_data::of_gradient", mutates_args=())
    def of_gradient(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    of_gradient.register_fake(torch.empty_like)
    of_gradient.register_autograd(lambda ctx, grad: grad * grad.sum().item())
    eager, compiled = both(lambda x: of_gradient(x.sin()).cos(), _inputs()[0], fullgraph=False)
    torch.testing.assert_close(eager[:2], compiled[:2])


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda x: torch.tensor(x.detach().tolist(), dtype=x.dtype),
    "numpy": lambda x: torch.from_numpy((x * 2).detach().numpy().copy()),
    "asarray": lambda x: torch.from_numpy(np.asarray(x.detach()).copy()),
    "data_ptr": lambda x: int(x.data_ptr() != 0),
}


@pytest.mark.parametrize("read", READS)
def test_a_traced_program_that_reads_data_is_refused(read: str) -> None:
    """Without capture, which lets the graph end there: what was read was whatever lay where a tensor would have."""
    compiled = aot_function(lambda x: x * READS[read](x), fw_compiler=lambda graph, inputs: graph.forward)
    with pytest.raises(DataDependent, match="traced without data"):
        compiled(torch.randn(3, requires_grad=True))
