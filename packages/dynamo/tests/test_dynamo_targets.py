"""What can be compiled: functions of torch itself, builtins, methods, partials, callable objects, compiled functions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchdynamo

X = torch.linspace(-2, 2, 20).view(4, 5)


class Scaled:
    def __init__(self) -> None:
        self.weight = torch.arange(5.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x + 2


LINEAR = nn.Linear(5, 3)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (F.cross_entropy, (X, torch.tensor([0, 1, 2, 3]))),
        (F.relu, (X,)),
        (F.layer_norm, (X, (5,))),
        (F.max_pool1d, (X[None], 2)),
        (torch.sin, (X,)),
        (torch.relu, (X,)),
        (torch.einsum, ("ij,ij->i", X, X)),
        (torch.norm, (X,)),
        (torch.Tensor.sin, (X,)),
        (torch.ops.aten.sin.default, (X,)),
        (operator.add, (X, X)),
        (X.add, (X,)),
        (LINEAR, (X,)),
        (LINEAR.forward, (X,)),
        (functools.partial(F.softmax, dim=1), (X,)),
        (functools.partial(torch.sum, dim=1), (X,)),
        (functools.partial(LINEAR.forward), (X,)),
        (Scaled(), (X,)),
        (Scaled().static, (X,)),
        (Scaled.of_class, (X,)),
        (torch.no_grad()(lambda x: x * 3), (X,)),
    ],
)
def test_target(target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    options = torchdynamo.CaptureOptions(fullgraph=True, strict=True)
    compiled = torchdynamo.optimize(backend, options=options)(target)
    for _ in range(3):
        torch.testing.assert_close(compiled(*arguments), target(*arguments), rtol=0, atol=0)
    assert len(graphs) == 1


def test_function_of_torch_keeps_its_name() -> None:
    compiled = torchdynamo.optimize(lambda gm, inputs: gm.forward)(F.cross_entropy)
    assert (compiled.__name__, compiled.__doc__) == (F.cross_entropy.__name__, F.cross_entropy.__doc__)


def test_compiled_twice_is_compiled_once() -> None:
    decorate = torchdynamo.optimize(lambda gm, inputs: gm.forward)
    once = decorate(F.cross_entropy)
    assert decorate(once) is once
    method = decorate(LINEAR.forward)
    assert decorate(method) == method


@pytest.mark.parametrize("target", [Scaled, 3, None])
def test_what_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match="expected a function, a method, a callable object or an nn.Module"):
        torchdynamo.optimize(lambda gm, inputs: gm.forward)(target)
