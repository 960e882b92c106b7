"""Methods that `super()` gives of a C type, where the class overrides them: the same ones behind a break."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo
from torchdynamo import CaptureOptions


class Doubling(list[Any]):
    def append(self, item: Any) -> None:
        method = super().append
        torchdynamo.graph_break()
        method(item * 2)


class Counting(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        method = super().__setitem__
        torchdynamo.graph_break()
        method(key, value + 1)

    def get(self, key: str, default: Any = None) -> Any:
        method = super().get
        torchdynamo.graph_break()
        return method(key, default) * 3


class Turning(collections.deque[Any]):
    def append(self, item: Any) -> None:
        method = super().appendleft
        torchdynamo.graph_break()
        method(item)


class Contrary(torch.Tensor):
    def __bool__(self) -> bool:
        return not super().__bool__()

    def sin(self) -> torch.Tensor:
        method = super().cos
        torchdynamo.graph_break()
        return method()

    def cos(self) -> torch.Tensor:
        return self * 0


def lists(x: torch.Tensor) -> Any:
    found = Doubling()
    found.append(x)
    return found, type(found) is Doubling


def dicts(x: torch.Tensor) -> Any:
    found = Counting()
    found["a"] = x
    return dict(found), found.get("a"), found.get("b", x)


def deques(x: torch.Tensor) -> Any:
    found = Turning([x])
    found.append(x + 1)
    return list(found)


def tensors(x: torch.Tensor) -> Any:
    sign = (x.sum() > 0).as_subclass(Contrary)
    return 1 if sign else 2, x.as_subclass(Contrary).sin().as_subclass(torch.Tensor)


@pytest.mark.parametrize("program", [lists, dicts, deques, tensors], ids=lambda program: program.__name__)
def test_as_eager(program: Callable[[torch.Tensor], Any]) -> None:
    compiled = torchdynamo.optimize(lambda graph, inputs: graph)(program)
    for x in (torch.ones(2), -torch.ones(2)):
        torch.testing.assert_close(compiled(x), program(x))


def _lent(x: torch.Tensor, base: type, kind: type) -> torch.Tensor:
    return kind().shift(x)


def _given(x: torch.Tensor, base: type, kind: type) -> torch.Tensor:
    base.late = lambda self, x: x + 7
    try:
        return kind().delay(x)
    finally:
        del base.late


@pytest.mark.parametrize("program", [_lent, _given])
def test_a_base_class_gets_a_method(program: Callable[..., torch.Tensor]) -> None:
    """Between two calls a class on the way gets the method that `super()` finds further on, or in the call itself."""

    class Far:
        def shift(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Near(Far):
        pass

    class User(Near):
        def shift(self, x: torch.Tensor) -> torch.Tensor:
            return super().shift(x) * 3

        def delay(self, x: torch.Tensor) -> torch.Tensor:
            return super().late(x) * 2

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=CaptureOptions(strict=True))(program)
    x = torch.ones(2)
    assert compiled(x, Near, User).equal(program(x, Near, User))
    Near.shift = lambda self, x: x - 5
    assert compiled(x, Near, User).equal(program(x, Near, User))
