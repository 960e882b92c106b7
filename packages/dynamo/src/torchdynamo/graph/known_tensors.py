"""Tensors of which something is known while the graph is recorded.

Tensors of one number that the program computed from plain numbers (`torch.div(length, 2, rounding_mode="floor")`).

Their value is known while the graph is recorded, so that they can be sizes, indices and conditions as in eager.
The number lies in the fake tensor's memory (`Memory.constant`) until something writes to it.

Uniform random numbers lie in [0, 1): `torch.rand([]) < 0.0` is false whatever was drawn, so that models which drop
layers at random have no branch on data where the probability is 0 (or 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from primtorch.fake import FakeMode, FakeTensor
from primtorch.spec import TensorSpec

# Arithmetic on numbers: by the name of the function or method.
ARITHMETIC: frozenset[str] = frozenset(
    {
        "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide",
        "remainder", "fmod", "neg", "negative", "abs", "absolute", "minimum", "maximum", "ceil", "floor",
        "trunc", "round", "square", "sqrt", "__add__", "__sub__", "__mul__", "__truediv__", "__div__",
        "__floordiv__", "__mod__", "__neg__", "__abs__", "__radd__", "__rsub__", "__rmul__", "__rtruediv__",
        "__rdiv__", "__rfloordiv__", "__rmod__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
        "eq", "ne", "lt", "le", "gt", "ge", "int", "long", "float", "double", "to", "clone",
    }
)  # fmt: skip
# Questions about a tensor's value, and the answer from the value.
VALUES: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda value: value.item(),
    "tolist": lambda value: value.tolist(),
    "__int__": lambda value: int(value.item()),
    "__float__": lambda value: float(value.item()),
    "__bool__": lambda value: bool(value.item()),
    "__index__": torch.Tensor.__index__,
    "is_nonzero": lambda value: bool(value.item()),
}
# Functions whose arguments are sizes and dims; C++ would ask a tensor among them for its number.
TAKES_SIZES: frozenset[str] = frozenset(
    {
        "view", "reshape", "expand", "repeat", "tile", "unflatten", "as_strided", "narrow", "split", "chunk",
        "resize", "new_zeros", "new_ones", "new_empty", "new_full", "zeros", "ones", "empty", "full",
        "arange", "roll", "unfold", "select", "__getitem__",
    }
)  # fmt: skip


# Those of them that begin with a size.
FACTORIES: frozenset[str] = frozenset({"zeros", "ones", "empty", "full", "arange"})

# What `x <op> bound` is for each x in [0, 1), when the answer is the same for all of them.
UNIFORM_COMPARISONS: dict[str, Callable[[float], bool | None]] = {
    "lt": lambda bound: False if bound <= 0 else True if bound >= 1 else None,
    "ge": lambda bound: True if bound <= 0 else False if bound >= 1 else None,
    "le": lambda bound: False if bound < 0 else True if bound >= 1 else None,
    "gt": lambda bound: True if bound < 0 else False if bound >= 1 else None,
}
UNIFORM: frozenset[str] = frozenset({"rand", "rand_like"})


def value_of(fake: object) -> torch.Tensor | None:
    """The value of a tensor without dims that is known, else None."""
    return fake.memory.constant if isinstance(fake, FakeTensor) and fake.dim() == 0 else None


def number(fake: FakeTensor) -> object:
    """The number of a tensor whose value is known."""
    assert fake.memory.constant is not None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return fake.memory.constant.item()


def answer(name: str, args: tuple[object, ...]) -> tuple[object] | None:
    """The result of a question about the value of a known number, in a tuple; None when it is no such question."""
    known = value_of(args[0]) if name in VALUES and len(args) == 1 else None
    if known is None:
        return None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return (VALUES[name](known),)


def sizes_as_numbers(name: str, args: tuple[object, ...]) -> tuple[object, ...]:
    """The arguments of a function that takes sizes, with known whole numbers in place of the tensors that hold them."""
    first = 0 if name in FACTORIES else 1  # the tensor itself is no size, though it may hold one
    if name not in TAKES_SIZES or not any(map(_holds_size, args[first:])):
        return args
    return (*args[:first], *map(_as_number, args[first:]))


def _holds_size(value: Any) -> bool:
    if type(value) in (tuple, list):
        return any(map(_holds_size, value))
    if type(value) is slice:
        return any(map(_holds_size, (value.start, value.stop, value.step)))
    return isinstance(value, FakeTensor) and value_of(value) is not None


def _as_number(value: Any) -> object:
    if type(value) in (tuple, list):
        return type(value)(map(_as_number, value))
    if type(value) is slice:
        return slice(*map(_as_number, (value.start, value.stop, value.step)))
    known = value_of(value)
    if known is None or known.dtype.is_floating_point or known.dtype in (torch.bool, torch.complex64, torch.complex128):
        return value
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return known.item()


def of_numbers(
    name: str, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], mode: FakeMode
) -> FakeTensor | None:
    """The result of arithmetic on plain numbers alone (a symbolic one is fixed), else None."""
    plain = (isinstance(arg, torch.SymInt) or _is_plain(arg) for arg in (*args, *kwargs.values()))
    if name not in ARITHMETIC or not args or not all(plain):
        return None
    numbers = [int(arg) if isinstance(arg, torch.SymInt) else arg for arg in args]
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        value = func(*numbers, **kwargs)
        if not isinstance(value, torch.Tensor):
            return None
        fake = FakeTensor(TensorSpec.of(value), mode)
    fake.memory.constant = value
    return fake


def fold(
    name: str, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], result: object
) -> None:
    """Computes arithmetic on known numbers at once, and keeps the value with its result."""
    if name not in ARITHMETIC or value_of(result) is not None:
        return
    if not isinstance(result, FakeTensor) or result.dim() or result.device.type != "cpu" or result.requires_grad:
        return
    operands = [_operand(arg) for arg in args]
    if any(operand is None for operand in operands) or not all(map(_is_plain, kwargs.values())):
        return
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        value = func(*operands, **kwargs)
    if isinstance(value, torch.Tensor) and value.dtype is result.dtype:
        result.memory.constant = value


def remember_uniform(name: str, result: object) -> None:
    """Keeps in mind that a fresh tensor's numbers lie in [0, 1), until something writes to it."""
    if name in UNIFORM and isinstance(result, FakeTensor) and result.dtype in (torch.float32, torch.float64):
        result._uniform_version = None if result.is_inference() else result._version  # type: ignore[attr-defined]


def fold_uniform(name: str, args: tuple[object, ...], result: object) -> None:
    """Answers a comparison of uniform random numbers with a number that lies outside of their range."""
    rule = UNIFORM_COMPARISONS.get(name.strip("_"))
    if rule is None or len(args) != 2 or not isinstance(result, FakeTensor) or result.dim():
        return
    drawn, bound = args
    version = getattr(drawn, "_uniform_version", None)
    fresh = isinstance(drawn, torch.Tensor) and version is not None and version == drawn._version
    if not fresh or not (type(bound) is int or type(bound) is float):
        return
    outcome = rule(bound)
    if outcome is not None:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            result.memory.constant = torch.tensor(outcome)


def _operand(value: object) -> object:
    """A real operand for what stands for it; None when its value is not known."""
    return value if _is_plain(value) else value_of(value)


def _is_plain(value: object) -> bool:
    return type(value) in (int, float, bool, str, torch.dtype)
