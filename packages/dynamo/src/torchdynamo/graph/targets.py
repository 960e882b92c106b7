"""What a call that torch asks the mode about is in a graph: the kind of its node, the target, the arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType

import torch

from torchdynamo.graph.tensor_classes import redefines
from torchdynamo.reasons import BreakGraph

# Operator methods of tensors and the function that a reader of the graph knows them by.
_TWO_SIDED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_INPLACE = tuple(f"i{name}" for name in _TWO_SIDED)
_FUNCTIONS: dict[str, Callable[..., object]] = {
    **{name: getattr(operator, f"__{name}__") for name in (*_TWO_SIDED, *_INPLACE, "matmul", "neg", "pos", "abs")},
    **{name: getattr(operator, name) for name in ("invert", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem")},
    "div": operator.truediv,
    "idiv": operator.itruediv,
}
_OPERATORS = {f"__{name}__": function for name, function in _FUNCTIONS.items()}
# Reflected operators: the same function with its operands exchanged.
_REFLECTED = {f"__r{name}__": _FUNCTIONS[name] for name in (*_TWO_SIDED, "matmul", "div")}
# The reflected division of a tensor multiplies by the reciprocal, which rounds otherwise. The operator asks the left
# operand first: of two tensors it would be the other's division.
_BY_RECIPROCAL = frozenset({"__rdiv__", "__rtruediv__"})
# Operators that torch defines in Python go by the name of the function that they wrap.
_WRAPPED_OPERATORS: dict[object, str] = {
    method: name
    for name in (*_OPERATORS, *_REFLECTED)
    if isinstance(method := getattr(torch.Tensor, name, None), FunctionType) and method.__name__ != name
}


def function_name(func: object) -> str:
    """The name a user knows a torch function by; for properties, the property's."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return str(name)


def target_of(
    func: Callable[..., object] | str, args: tuple[object, ...]
) -> tuple[str, Callable[..., object] | str, tuple[object, ...]]:
    """(FX node kind, target, arguments) for a torch function as the mode receives it."""
    raw: str = _WRAPPED_OPERATORS.get(func, "") or getattr(func, "__name__", "")
    redefined = redefines(args, function_name(func) if raw == "__get__" else str(raw))
    if redefined is not None and (raw == "__get__" or raw in _OPERATORS or raw in _REFLECTED):
        raise BreakGraph("tensor_subclass", f"{redefined.__qualname__} has its own {function_name(func)}")
    if raw == "__get__":
        return "call_function", getattr, (args[0], function_name(func))
    if raw in _OPERATORS:
        return "call_function", _OPERATORS[raw], args
    if raw in _REFLECTED and not (raw in _BY_RECIPROCAL and isinstance(args[1], torch.Tensor)):
        return "call_function", _REFLECTED[raw], (args[1], args[0], *args[2:])
    if func is torch.Tensor.new and len(args) == 2 and isinstance(args[1], torch.Size):
        return "call_method", "new_empty", args  # FX writes sizes as a tuple, which `new` would take for the elements
    method = args and isinstance(args[0], torch.Tensor) and getattr(torch.Tensor, raw, None) is func
    if raw and method and redefined is None:
        return "call_method", raw, args
    return "call_function", func, args
