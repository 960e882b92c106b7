"""Methods that `super()` gives of a C type, where the class overrides them: the same ones behind a break."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo


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
