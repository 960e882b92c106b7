"""What capture reads in another form gives what the function itself gives, and sees what is registered later."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributions import constraints

import torchdynamo
from torchdynamo.calls.other_forms import OTHER_FORMS

EYE = torch.eye(3)
MATRICES = {
    "positive definite": torch.stack([EYE, 2 * EYE]),
    "one of them not": torch.stack([EYE, -EYE]),
    "one of them not symmetric": torch.stack([EYE, EYE + torch.ones(3, 3).triu(1)]),
    "with a nan": torch.stack([EYE, EYE * torch.nan]),
    "alone": EYE,
    "of no batch": torch.ones(0, 3, 3),
    "not square": torch.ones(2, 3, 4),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("kind", [constraints._Symmetric, constraints._PositiveDefinite])
def test_constraints_of_matrices(kind: Any, name: str) -> None:
    own, matrix = kind(), MATRICES[name]
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(lambda x: own.check(x))
    wanted = kind.check(own, matrix)
    for found in (OTHER_FORMS[kind.check](own, matrix), compiled(matrix)):
        torch.testing.assert_close(found, wanted)


def test_a_check_of_all_elements_raises_what_eager_raises() -> None:
    def program(x: torch.Tensor, cond: Any) -> torch.Tensor:
        torch._check_tensor_all(cond, lambda: "too large")
        return x * 2

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    x = torch.ones(3)
    assert torch.equal(compiled(x, x < 2), x * 2)
    for cond in (x > 2, x, True):
        with pytest.raises(Exception) as wanted:
            program(x, cond)
        with pytest.raises(type(wanted.value), match=str(wanted.value)[:20]):
            compiled(x, cond)


def test_a_generic_function_takes_what_is_registered_later() -> None:
    @functools.singledispatch
    def scaled(x: Any) -> Any:
        return x

    class Own:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    @scaled.register(torch.Tensor)
    def of_tensor(x: torch.Tensor) -> Any:
        return x * 2

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(lambda x: (scaled(x), scaled(Own(x))))
    x = torch.ones(3)
    for _ in range(2):
        first, second = compiled(x)
        assert torch.equal(first, x * 2) and torch.equal(second.x, x)
    scaled.register(Own)(lambda own: own.x * 3)
    assert torch.equal(compiled(x)[1], x * 3)
    scaled.register(torch.Tensor)(lambda t: t * 5)
    assert torch.equal(compiled(x)[0], x * 5)


def test_one_hot_takes_no_index_out_of_the_tensor() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x, 5) * 2

    compiled = torchdynamo.optimize(backend)(program)
    for labels in (torch.tensor([0, 3]), torch.tensor([4, 1]), torch.zeros(2, dtype=torch.int64)):
        assert torch.equal(compiled(labels), program(labels))
    for labels in (torch.tensor([5, 0]), torch.tensor([-1, 0])):
        with pytest.raises(RuntimeError, match="Class values must be"):
            compiled(labels)
    (graph,) = graphs
    assert not any("one_hot" in str(node.target) for node in graph.graph.nodes)
