"""Under deterministic algorithms nothing is added in an order that a device does not keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import torchcompile
from torchinductor import CppBackend, register_codegen

Tensor = torch.Tensor


class Unordered(CppBackend):
    """Computes on the CPU, and is taken for a device whose iterations write in no order."""

    traits = replace(CppBackend.traits, ordered_stores=False)


@pytest.fixture
def unordered() -> Iterator[None]:
    register_codegen("cpu", Unordered())
    yield
    register_codegen("cpu", CppBackend())


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


PLACES = torch.tensor([[0, 2, 0], [1, 1, 1]])
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter_add": lambda x: torch.zeros(4, 3, dtype=x.dtype).scatter_add(0, PLACES, x[:2] * 2).sin(),
    "scatter": lambda x: x.t().cos().scatter(1, PLACES, x[:2].exp()),
    "index_add": lambda x: (x * 2).index_add(0, PLACES[0], x.sin()),
    "index_put": lambda x: (x + 1).t().index_put((PLACES[0],), x.sin(), accumulate=True),
    "the derivative of a gather": lambda x: x.sin()[PLACES].square().sum(0),
    "the derivative of an embedding": lambda x: F.embedding(PLACES, x.sin()).square(),
}


def gradients(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    out = fn(leaf)
    out.double().square().sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def calls() -> int:
    return sum(graph.aten_calls for graph in torchcompile.report().graphs)


@pytest.mark.usefixtures("unordered", "deterministic")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_added_at_computed_places_is_a_call(name: str) -> None:
    fn = PROGRAMS[name]
    x = torch.randn(3, 3, dtype=torch.float64)
    found = gradients(torchcompile.compile(fn, fullgraph=True), x)
    assert calls() > 0
    torch.testing.assert_close(found, gradients(fn, x))


@pytest.mark.usefixtures("unordered")
def test_a_graph_is_compiled_for_each_setting() -> None:
    fn = PROGRAMS["scatter_add"]
    compiled = torchcompile.compile(fn, fullgraph=True)
    x = torch.randn(3, 3, dtype=torch.float64)
    compiled(x)
    assert calls() == 0
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(compiled(x), fn(x))
        assert calls() > 0
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_loops_of_the_cpu_keep_their_order() -> None:
    compiled = torchcompile.compile(PROGRAMS["scatter_add"], fullgraph=True)
    compiled(torch.randn(3, 3))
    assert calls() == 0
