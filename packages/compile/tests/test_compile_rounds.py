"""Loops with another number of rounds at each call, through the whole stack: values, gradients, writes, the report."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchcompile

ROUNDS = (3, 1, 2, 5, 4, 6, 0, 7, 8, 9, 10, 12)

pytestmark = [
    pytest.mark.warm,
    pytest.mark.usefixtures("double"),
    pytest.mark.expected_eager("loop_of_each_length", "list_of_each_length", "checkpoint"),
]


def inputs(n: int, rows: int = 3) -> list[torch.Tensor]:
    """Leaves that require a gradient, tensors whose strides are in the other order, and empty ones."""
    made = []
    for i in range(n):
        x = torch.linspace(-1, 1, rows * 4).reshape(rows, 4) + i
        made.append((x.requires_grad_(), x.T.contiguous().T, x[:0])[i % 3])
    return made


def summed(xs: list[torch.Tensor]) -> Any:
    total: Any = 0
    for i, x in enumerate(xs):
        total = total + (x.sin() * (i + 1)).sum()
    return total


def kept(xs: list[torch.Tensor]) -> Any:
    found = [x * 2 for x in xs if x.shape[0]]
    return sum(torch.cat(found).sin().sum(1)) if found else None


def written(xs: list[torch.Tensor]) -> Any:
    total = torch.zeros(4)
    with torch.no_grad():
        for x in reversed(xs):
            x.mul_(0.5) if x.is_contiguous() else None
            total = total + x.sum(0)
    return total


def guarded(xs: list[torch.Tensor]) -> Any:
    total = torch.zeros(4)
    try:
        for i, x in enumerate(xs):
            if i == 6:
                raise ValueError(i)
            total = total + x.sum(0)
        else:
            total = total.exp()
    except ValueError as error:
        return total * error.args[0]
    return total


def recomputed(xs: list[torch.Tensor]) -> Any:
    def inner(*given: torch.Tensor) -> Any:
        total = torch.zeros(4)
        for x in given:
            total = total + x.tanh().sum(0)
        return total

    return checkpoint(inner, *xs, use_reentrant=False) if xs else None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, xs: list[torch.Tensor]) -> Any:
        state, found = torch.zeros(1, 4), []
        for x in xs:
            for row in range(x.shape[0]):
                state = self.cell(x[row : row + 1], state)
            found.append(state)
        return torch.stack(found) if found else state


torch.manual_seed(0)
PROGRAMS: list[Callable[..., Any]] = [summed, kept, written, guarded, recomputed, Recurrent().double()]


def run(program: Callable[..., Any], xs: list[torch.Tensor]) -> tuple[Any, ...]:
    result = program(xs)
    grads = ()
    if isinstance(result, torch.Tensor) and result.requires_grad:
        leaves = [x for x in xs if x.requires_grad]
        leaves += program.parameters() if isinstance(program, nn.Module) else []
        grads = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    return result, grads, xs


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: getattr(program, "__name__", "recurrent"))
def test_results_gradients_and_writes_are_eagers_at_every_number(program: Any) -> None:
    compiled = torchcompile.compile(program)
    captured = []
    for rounds in (ROUNDS, (11, 3, 0, 13)):
        for n in rounds:
            torch.testing.assert_close(run(compiled, inputs(n)), run(program, inputs(n)))
        captured.append(torchcompile.report().captured)
    assert captured[0] == captured[1], captured


def test_several_derivatives_of_one_call() -> None:
    compiled = torchcompile.compile(summed)
    for n in (3, 1, 5, 6):
        results = []
        for program in (summed, compiled):
            xs = inputs(n)
            leaves = [x for x in xs if x.requires_grad]
            first = torch.autograd.grad(program(xs), leaves, create_graph=True)
            results.append((first, torch.autograd.grad(sum(g.sum() for g in first), leaves)))
        torch.testing.assert_close(*results)


def test_the_report_says_it_once() -> None:
    compiled = torchcompile.compile(summed)
    for n in ROUNDS:
        compiled(inputs(n))
    report = torchcompile.report()
    (event,) = report.breaks
    assert event.kind.id == "loop_of_each_length" and event.line.function == "summed"
    assert not report.fallbacks and event.kind.explanation in html.unescape(report.html())


@pytest.mark.expected_eager("recompile_limit")
def test_fullgraph_names_the_length_where_there_are_too_many() -> None:
    compiled = torchcompile.compile(summed, fullgraph=True, options={"recompile_limit": 3})
    for n in (1, 2, 3, 2):
        torch.testing.assert_close(compiled(inputs(n)), summed(inputs(n)))
    with pytest.raises(Exception, match="xs: length 3 expected, got 4"):
        compiled(inputs(4))
    assert not torchcompile.report().breaks


def test_threads_share_the_rounds() -> None:
    compiled = torchcompile.compile(summed)
    wrong: list[object] = []
    begin = threading.Barrier(4)

    def work(seed: int) -> None:
        begin.wait()
        try:
            for call in range(12):
                n = (seed * 5 + call) % 9
                torch.testing.assert_close(run(compiled, inputs(n)), run(summed, inputs(n)))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert not torchcompile.report().fallbacks
