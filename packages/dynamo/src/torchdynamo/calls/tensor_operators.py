"""Operators between a tensor and an object that torch takes in the place of one, by its `__torch_function__`; and
whether two tensors are equal.

Python asks the methods of both, one after the other. A tensor's tells the object's class which function of torch it
stands for; where that raises TypeError, or has no answer, the other operand is asked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch

from primtorch.fake import FakeTensor
from torchdynamo.graph.tensor_classes import class_of, own_classes, stands_for_tensor
from torchdynamo.interpreter.operators import BINARY, COMPARE
from torchdynamo.interpreter.protocol import Args, Callee, Kwargs, World
from torchdynamo.reasons import BreakGraph

_NAMES = {
    "add": "add", "radd": "add", "iadd": "add_", "sub": "sub", "isub": "sub_", "mul": "mul", "rmul": "mul",
    "imul": "mul_", "truediv": "div", "itruediv": "div_", "ifloordiv": "floor_divide_", "mod": "remainder",
    "imod": "remainder_", "matmul": "matmul", "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne",
}  # fmt: skip
TOLD: Mapping[Callable[..., object], Callable[..., object]] = {
    getattr(torch.Tensor, f"__{method}__"): getattr(torch.Tensor, name) for method, name in _NAMES.items()
}
"""The function that a class is told of in the place of a tensor's method, where that is another one."""


def is_between(a: object, b: object) -> bool:
    """Whether one is a tensor and the other stands for one."""
    return (isinstance(a, FakeTensor) and stands_for_tensor(b)) or (isinstance(b, FakeTensor) and stands_for_tensor(a))


def binary(world: World, symbol: str, a: object, b: object, in_place: bool = False) -> object:
    """`a op b`, or `a op= b`.

    Raises:
        TypeError: as Python does.
    """
    *_, method, reflected, own = BINARY[symbol]
    value = _asked(world, own, a, b) if in_place else NotImplemented
    if value is NotImplemented:
        value = _asked(world, method, a, b)
    if value is NotImplemented:
        value = _asked(world, reflected, b, a)
    if value is not NotImplemented:
        return value
    kinds = f"'{_name(a)}' and '{_name(b)}'"
    shown = {"**": "** or pow()", "divmod": "divmod()"}.get(symbol, symbol)
    raise TypeError(f"unsupported operand type(s) for {shown}{'=' * in_place}: {kinds}")


def is_by_class(symbol: str, a: object, b: object) -> bool:
    """Whether a class of tensors among the operands has a comparison of its own."""
    _, *names = COMPARE[symbol]
    return any(_own(value, name) is not None for value in (a, b) for name in names)


def compare(world: World, symbol: str, a: object, b: object) -> object:
    """`a op b` for a comparison, by the methods of the operands' classes.

    Raises:
        TypeError: as Python does.
    """
    native, method, reflected = COMPARE[symbol]
    tries = [(method, a, b), (reflected, b, a)]
    kinds = [class_of(v) or torch.Tensor if isinstance(v, FakeTensor) else type(v) for v in (a, b)]
    if kinds[0] is not kinds[1] and issubclass(kinds[1], kinds[0]):
        tries.reverse()
    for name, of, other in tries:
        kind = _own(of, name)
        if kind is not None:
            value = world.call(world.getattr(kind, name), (of, other), {})
        else:
            value = _asked(world, name, of, other)
        if value is not NotImplemented:
            return value
    if native in (operator.eq, operator.ne):
        return (a is b) is (native is operator.eq)
    raise TypeError(f"'{symbol}' not supported between instances of '{kinds[0].__name__}' and '{kinds[1].__name__}'")


def _own(value: object, name: str) -> type | None:
    """The class of a tensor, if it has a method of this name in the place of torch's."""
    kind = class_of(value) if isinstance(value, FakeTensor) else None
    return kind if kind is not None and any(name in vars(klass) for klass in own_classes(kind)) else None


def _asked(world: World, name: str, of: object, other: object) -> object:
    """What a method of an operand gives, NotImplemented where it has none or, of a tensor, it raises TypeError."""
    method = getattr(type(of), name, None)
    if method is None:
        return NotImplemented
    if not isinstance(of, torch.Tensor):
        return world.call(method, (of, other), {})
    try:
        return world.call(method, (of, other), {})
    except TypeError:
        return NotImplemented


def _name(value: object) -> str:
    return "Tensor" if isinstance(value, FakeTensor) else type(value).__name__


def equal(fn: Callee, args: Args, kwargs: Kwargs) -> bool:
    """`torch.equal` of tensors whose sizes differ, which the data has no say in.

    Raises:
        BreakGraph: of others.
    """
    pair = args if len(args) == 2 and not kwargs else ()
    if all(isinstance(t, FakeTensor) and class_of(t) is None for t in pair) and pair:
        a, b = pair
        if a.dtype is b.dtype and a.device == b.device and (a.dim() != b.dim() or tuple(a.shape) != tuple(b.shape)):
            return False
    raise BreakGraph("data_dependent_branch", "equal() of a tensor")


RULES = ((torch.equal, equal), (torch.Tensor.equal, equal))
