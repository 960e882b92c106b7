"""Operators between a tensor and an object that torch takes in the place of one: which of the two is asked, what it is
told, and what comes of it, as in eager and in one graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchcompile
from primtorch.ledger import REFUSED


class Doubles:
    """Runs the call on what it holds, and doubles the result."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [arg.held if isinstance(arg, Doubles) else arg for arg in args]
        return func(*given, **(kwargs or {})) * 2


class Tells(Doubles):
    """Gives what it is asked: the function's name."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func.__name__, [type(arg).__name__ for arg in args if isinstance(arg, Doubles)]


class Refuses(Doubles):
    """Has no answer; its own operators have."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other * 5

    def __gt__(self, other: Any) -> Any:
        return self.held - other


class Raises(Doubles):
    """A TypeError of torch's function is no answer either."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(func.__name__)

    def __radd__(self, other: Any) -> Any:
        return other * 7


class Reflects(Doubles):
    """Has operators of its own, which are asked behind the tensor's."""

    def __radd__(self, other: Any) -> Any:
        return other * 3

    def __add__(self, other: Any) -> Any:
        return self.held * other


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: getattr(operator, name)
        for name in (
            "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne",
            "iadd", "isub", "imul", "itruediv", "imatmul",
        )
    },
    "method": lambda x, other: x.add(other),
    "function": lambda x, other: torch.add(x, other),
    "reflected": lambda x, other: other + x,
    "reflected power": lambda x, other: other**x,
    "reflected difference": lambda x, other: other - x,
    "two objects": lambda x, other: torch.add(other, other),
    "in a list": lambda x, other: torch.stack([x, other]) if type(other) is Tells else x,
}  # fmt: skip


def outcome(program: Callable[..., Any]) -> Any:
    """Result, gradient, or what is raised."""
    x = torch.linspace(1, 2, 9, dtype=torch.float64).view(3, 3).requires_grad_()
    y = torch.linspace(2, 4, 9, dtype=torch.float64).view(3, 3)
    try:
        found = program(x, y)
        if isinstance(found, torch.Tensor) and found.requires_grad:
            found.sum().backward()
    except Exception as error:
        return type(error)
    return [found, x.grad]


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", [Doubles, Tells, Refuses, Raises, Reflects])
def test_the_same_is_asked_as_in_eager(kind: type[Doubles], name: str) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return OPERATORS[name](x * 1, kind(y))

    wanted = outcome(program)
    found = outcome(torchcompile.compile(program, backend="aot_eager"))
    if isinstance(wanted, type):
        assert found is wanted
        return
    if isinstance(wanted[0], torch.Tensor):
        torch.testing.assert_close(found, wanted)
    else:
        assert found == wanted
    assert not [event for event in torchcompile.report().events if event.effect in REFUSED]
