"""Operators on real objects, with Python special methods interpreted.

When neither operand's type has Python code for an operation, the native operator does all of it.
Otherwise the data model's rules are followed here, and native slots take part through their wrappers.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import Any

from torchdynamo.interpreter import structural
from torchdynamo.interpreter.attributes import is_python, python_method
from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.protocol import InterpreterObject, World
from torchdynamo.interpreter.structural import STRUCTURES

# symbol: (native operator, native in-place operator, method, reflected method, in-place method)
BINARY: dict[str, tuple[Callable[[object, object], object], Callable[[object, object], object], str, str, str]] = {
    "+": (operator.add, operator.iadd, "__add__", "__radd__", "__iadd__"),
    "-": (operator.sub, operator.isub, "__sub__", "__rsub__", "__isub__"),
    "*": (operator.mul, operator.imul, "__mul__", "__rmul__", "__imul__"),
    "/": (operator.truediv, operator.itruediv, "__truediv__", "__rtruediv__", "__itruediv__"),
    "//": (operator.floordiv, operator.ifloordiv, "__floordiv__", "__rfloordiv__", "__ifloordiv__"),
    "%": (operator.mod, operator.imod, "__mod__", "__rmod__", "__imod__"),
    "**": (operator.pow, operator.ipow, "__pow__", "__rpow__", "__ipow__"),
    "@": (operator.matmul, operator.imatmul, "__matmul__", "__rmatmul__", "__imatmul__"),
    "&": (operator.and_, operator.iand, "__and__", "__rand__", "__iand__"),
    "|": (operator.or_, operator.ior, "__or__", "__ror__", "__ior__"),
    "^": (operator.xor, operator.ixor, "__xor__", "__rxor__", "__ixor__"),
    "<<": (operator.lshift, operator.ilshift, "__lshift__", "__rlshift__", "__ilshift__"),
    ">>": (operator.rshift, operator.irshift, "__rshift__", "__rrshift__", "__irshift__"),
    "divmod": (divmod, divmod, "__divmod__", "__rdivmod__", "__idivmod__"),
}
COMPARE: dict[str, tuple[Callable[[Any, Any], object], str, str]] = {
    "==": (operator.eq, "__eq__", "__eq__"),
    "!=": (operator.ne, "__ne__", "__ne__"),
    "<": (operator.lt, "__lt__", "__gt__"),
    "<=": (operator.le, "__le__", "__ge__"),
    ">": (operator.gt, "__gt__", "__lt__"),
    ">=": (operator.ge, "__ge__", "__le__"),
}
UNARY: dict[str, tuple[Callable[[Any], object], str]] = {
    "-": (operator.neg, "__neg__"),
    "+": (operator.pos, "__pos__"),
    "~": (operator.invert, "__invert__"),
}


def binary(world: World, symbol: str, a: object, b: object) -> object:
    """`a op b`, by the methods of the operands' classes where these are Python's. Raises TypeError as Python does."""
    native, _, method, reflected, _ = BINARY[symbol]
    kind_a, kind_b = type(a), type(b)
    if symbol == "%" and kind_a is str:
        return world.call(str.__mod__, (a, b), {})
    if not may_change(kind_a) and not may_change(kind_b):
        return native(a, b)
    if python_method(kind_a, method) is None and python_method(kind_b, reflected) is None:
        return native(a, b)
    value = _by_methods(world, a, b, method, reflected)
    if value is not NotImplemented:
        return value
    shown = {"**": "** or pow()", "divmod": "divmod()"}.get(symbol, symbol)
    raise TypeError(f"unsupported operand type(s) for {shown}: '{kind_a.__name__}' and '{kind_b.__name__}'")


# Their `+` and `*` are slots of sequences, tried after the numeric methods of both operands.
_SEQUENCES = (str, bytes, bytearray, list, tuple, collections.deque)
_SEQUENCE_METHODS = ("__add__", "__mul__")


def _by_methods(world: World, a: object, b: object, method: str, reflected: str) -> object:
    """The left operand's method first, unless the right one is of a subclass that overrides the reflected method."""
    kind_a, kind_b = type(a), type(b)
    tried_right = False
    if kind_a is not kind_b and issubclass(kind_b, kind_a):
        own, other = getattr(kind_b, reflected, None), getattr(kind_a, reflected, None)
        if own is not None and own is not other:
            tried_right = True
            value = world.call(own, (b, a), {})
            if value is not NotImplemented:
                return value
    left = getattr(kind_a, method, None)
    late = method in _SEQUENCE_METHODS and isinstance(a, _SEQUENCES) and not is_python(left)
    if left is not None and not late:
        value = world.call(left, (a, b), {})
        if value is not NotImplemented:
            return value
    right = getattr(kind_b, reflected, None)
    if right is not None and not tried_right and kind_a is not kind_b:
        value = world.call(right, (b, a), {})
        if value is not NotImplemented:
            return value
    return _sequence_operation(a, b, left, method) if late and left is not None else NotImplemented


def _sequence_operation(a: object, b: object, left: Callable[[object, object], object], method: str) -> object:
    if method == "__mul__" and not hasattr(type(b), "__index__"):
        raise TypeError(f"can't multiply sequence by non-int of type '{type(b).__name__}'")
    return left(a, b)


def inplace(world: World, symbol: str, a: object, b: object) -> object:
    """`a op= b`, by the method in place where there is one, else as `binary`."""
    _, native, method, reflected, in_place = BINARY[symbol]
    kind_a, kind_b = type(a), type(b)
    if not may_change(kind_a) and not may_change(kind_b):
        return native(a, b)
    own = python_method(kind_a, in_place)
    if own is not None:
        value = world.call(own, (a, b), {})
        if value is not NotImplemented:
            return value
    elif python_method(kind_a, method) is None and python_method(kind_b, reflected) is None:
        return native(a, b)
    elif hasattr(kind_a, in_place) and not (isinstance(a, _SEQUENCES) and method in _SEQUENCE_METHODS):
        value = world.call(getattr(kind_a, in_place), (a, b), {})
        if value is not NotImplemented:
            return value
    elif hasattr(kind_a, in_place):  # list += x: the numeric methods of x come first
        right = getattr(kind_b, reflected, None)
        value = NotImplemented if right is None else world.call(right, (b, a), {})
        return getattr(kind_a, in_place)(a, b) if value is NotImplemented else value
    value = _by_methods(world, a, b, method, reflected)
    if value is not NotImplemented:
        return value
    raise TypeError(f"unsupported operand type(s) for {symbol}=: '{kind_a.__name__}' and '{kind_b.__name__}'")


def compare(world: World, symbol: str, a: object, b: object) -> object:
    """`a op b` for a comparison; tuples and lists part by part, asking the world."""
    native, method, reflected = COMPARE[symbol]
    kind_a, kind_b = type(a), type(b)
    if kind_a in STRUCTURES and kind_b in STRUCTURES and structural.compares_parts(symbol, a, b):
        return structural.compare_parts(world, symbol, a, b)
    if not may_change(kind_a) and not may_change(kind_b):
        return native(a, b)
    names = (method, reflected, "__eq__") if symbol == "!=" else (method, reflected)  # object.__ne__ asks __eq__
    if all(python_method(kind, name) is None for kind in (kind_a, kind_b) for name in names):
        return native(a, b)
    tried_right = False
    if kind_a is not kind_b and issubclass(kind_b, kind_a):
        tried_right = True
        value = _rich(world, reflected, b, a)
        if value is not NotImplemented:
            return value
    value = _rich(world, method, a, b)
    if value is NotImplemented and not tried_right:
        value = _rich(world, reflected, b, a)
    if value is not NotImplemented:
        return value
    if symbol == "==":
        return a is b
    if symbol == "!=":
        return a is not b
    message = f"'{symbol}' not supported between instances of '{kind_a.__name__}' and '{kind_b.__name__}'"
    raise TypeError(message)


def _rich(world: World, method: str, a: object, b: object) -> object:
    function = getattr(type(a), method)
    if function is object.__ne__:
        value = _rich(world, "__eq__", a, b)
        return value if value is NotImplemented else not world.truth(value)
    return world.call(function, (a, b), {})


def unary(world: World, symbol: str, a: object) -> object:
    """`-a`, `+a`, `~a`"""
    native, method = UNARY[symbol]
    function = python_method(type(a), method) if may_change(type(a)) else None
    return native(a) if function is None else world.call(function, (a,), {})


def truth(world: World, obj: object) -> bool:
    """`bool(obj)`, by `__bool__`, else `__len__`."""
    kind = type(obj)
    if not may_change(kind):
        return bool(obj)
    method = python_method(kind, "__bool__")
    if method is not None:
        value = world.call(method, (obj,), {})
        if type(value) is not bool:
            raise TypeError(f"__bool__ should return bool, returned {type(value).__name__}")
        return value
    if not hasattr(kind, "__bool__") and python_method(kind, "__len__") is not None:
        return bool(world.call(len, (obj,), {}))
    return bool(obj)


def contains(world: World, container: Any, item: object) -> bool:
    """`item in container`"""
    kind = type(container)
    method = getattr(kind, "__contains__", None)
    if is_python(method):
        return world.truth(world.call(method, (container, item), {}))
    if isinstance(container, (list, tuple, collections.deque)):
        if structural.runs_python(item, ("__eq__",)) or structural.runs_python(container, ("__eq__",)):
            return structural.contains(world, container, item)
    elif isinstance(container, (dict, set, frozenset)):
        item = structural.stored_key(world, container, item)
    if not may_change(kind) or method is not None:
        return item in container
    if isinstance(container, InterpreterObject) or python_method(kind, "__iter__") or hasattr(kind, "__getitem__"):
        iterator = world.iterate(container)
        while True:
            try:
                value = world.advance(iterator)
            except StopIteration:
                return False
            if value is item or world.truth(world.compare("==", value, item)):
                return True
    return item in container
