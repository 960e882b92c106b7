"""Derivatives in Python that read data: those of an operator of the user's, as libraries write them for their experts.

A traced tensor has no data. The graph ends at such an operator, told with its line, and it runs as eager runs it, forward
and backward.
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
from primtorch.ledger import LEDGER, Effect, of

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


@pytest.mark.expected_eager("data_dependent_shape", "library_code")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("way", WAYS)
def test_a_derivative_that_reads_data_runs_as_eager_runs_it(way: str, backend: str, operators: dict[str, Any]) -> None:
    def program(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return operators[way]((x * 2).sin(), weights + 1, ends).cos().sum() + x.sum()  # type: ignore[no-any-return]

    compiled = torchcompile.compile(program, backend=backend, options={"strict": True})
    for ends in ([2, 5, 6], [0, 3, 6], [6, 6, 6], [1, 2, 6]):
        grads = []
        x, weights = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 3, 2, dtype=torch.float64)
        for run in (program, compiled):
            own = [t.clone().requires_grad_() for t in (x, weights)]
            run(*own, torch.tensor(ends)).backward()  # type: ignore[no-untyped-call]
            grads.append([t.grad for t in own])
        torch.testing.assert_close(*grads)
    assert not of(LEDGER.events, Effect.FALLBACK, Effect.RECOMPILE), LEDGER.events
    assert any(frame.function == "program" for event in LEDGER.events for frame in event.frames)


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
