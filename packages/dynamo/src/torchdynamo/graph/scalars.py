"""Numbers of the program of which some are symbols: operators, comparisons, functions, tensors made of them."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch

from primtorch.symbolic import numbers
from primtorch.symbolic.sym_node import SymNode
from torchdynamo.interpreter.attributes import missing_attribute
from torchdynamo.interpreter.protocol import MISSING, Escape
from torchdynamo.reasons import BreakGraph

T = TypeVar("T")

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (int, float, bool, *SYMBOLIC)
NUMBER_FUNCTIONS = numbers.NUMBER_FUNCTIONS


class NumberNeeded(Escape):
    """C code cannot do with a symbol where the program has a number; `error` is what it said."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def is_symbolic(value: object) -> TypeGuard[torch.SymInt | torch.SymFloat]:
    """Whether a value is a symbolic number. One of torch's, the size of a nested tensor, breaks the graph."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return False
    if not isinstance(value.node, SymNode):
        raise BreakGraph("special_tensor", f"the size {value} of a nested tensor")
    return True


def concrete(given: T) -> T:
    """The value with numbers in place of symbols (each guarded from now on), for C code that looks at all of it."""
    value: Any = given
    if isinstance(value, SYMBOLIC):
        value = value.node.pytype(value)
    elif type(value) in (list, tuple):
        value = type(value)(map(concrete, value))
    elif type(value) is dict:
        value = {key: concrete(item) for key, item in value.items()}
    given = value
    return given


def holds_any_symbol(value: object) -> bool:
    """Whether a value is a symbol, or a list, tuple or dict that holds one."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_any_symbol, value))
    return any(map(holds_any_symbol, value.values())) if type(value) is dict else isinstance(value, SYMBOLIC)


def attribute(number: torch.SymInt | torch.SymFloat | torch.SymBool, name: str) -> object:
    """An attribute of a run-time number as an int, a float or a bool has it. All but its parts asks for its value."""
    kind = number.node.pytype
    if name in ("real", "numerator") and hasattr(kind, name):
        return number if kind is not bool else bool(concrete(number)).real
    if name in ("imag", "denominator") and hasattr(kind, name):
        return getattr(kind(), name)
    if not hasattr(kind, name):
        raise missing_attribute(number, name, kind)
    method = getattr(kind, name)
    if kind is float and isinstance(method, types.MethodDescriptorType):
        return types.MethodType(method, number)  # its call asks for the value
    return kind if name == "__class__" else getattr(concrete(number), name)


def _both_numbers(a: object, b: object) -> bool:
    return (is_symbolic(a) or is_symbolic(b)) and type(a) in _NUMBERS and type(b) in _NUMBERS


def both_of_a_kind(a: object, b: object) -> bool:
    """Whether both are numbers of one type, and one is symbolic."""
    return (isinstance(a, SYMBOLIC) or isinstance(b, SYMBOLIC)) and _type(a) is _type(b)


def _type(number: object) -> object:
    return number.node.pytype if isinstance(number, SYMBOLIC) else type(number)


def binary(op: str, a: object, b: object, native: Callable[[object, object], object]) -> object:
    """`a op b` of two numbers; MISSING when no operand is symbolic, or one is no number."""
    return _of_two(numbers.binary, op, a, b, native)


def compare(op: str, a: object, b: object, native: Callable[[object, object], object]) -> object:
    """`a op b` of two numbers: a bool or a SymBool; MISSING as of `binary`."""
    return _of_two(numbers.compare, op, a, b, native)


def _of_two(
    symbolic: Callable[[str, object, object], object],
    op: str,
    a: object,
    b: object,
    native: Callable[[object, object], object],
) -> object:
    if not _both_numbers(a, b):
        return MISSING
    a, b = (bool(x) if isinstance(x, torch.SymBool) else x for x in (a, b))
    result = symbolic(op, a, b)
    return native(concrete(a), concrete(b)) if result is None else result


def unary(op: str, a: object, native: Callable[[object], object]) -> object:
    """`op a`; MISSING when it is not symbolic."""
    if not is_symbolic(a):
        return MISSING
    result = numbers.unary(op, a)
    return native(concrete(a)) if result is None else result


def call(fn: Callable[..., object], args: tuple[object, ...]) -> object:
    """A builtin or a function of `math` on numbers; MISSING when none is symbolic."""
    if fn in (min, max):
        return _extreme(fn, args)
    if not any(map(is_symbolic, args)):
        return MISSING
    if not all(type(arg) in _NUMBERS for arg in args):
        return MISSING
    result = numbers.function(fn, args)
    return fn(*map(concrete, args)) if result is None else result


def _extreme(fn: Callable[..., object], args: tuple[Any, ...]) -> object:
    """`min` and `max` of several numbers, one after another as Python compares them."""
    items = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
    if len(items) < 2 or not any(map(is_symbolic, items)) or not all(type(item) in _NUMBERS for item in items):
        return MISSING
    result = items[0]
    for item in items[1:]:
        if not is_symbolic(result) and not is_symbolic(item):
            result = fn(result, item)
            continue
        found = numbers.function(fn, (result, item))
        if found is None:  # an int and a float: the result's type depends on which it is
            native: Callable[[Any, Any], object] = operator.lt if fn is min else operator.gt
            better = compare("<" if fn is min else ">", item, result, native)
            found = item if better else result
        result = found
    return result


def indexes_by_symbol(key: object) -> bool:
    """Whether an index of a tensor has a symbolic int among ints, slices, None and Ellipsis."""
    items = key if type(key) is tuple else (key,)
    kinds = {type(item) for item in items}
    return torch.SymInt in kinds and kinds <= _BASIC_INDICES


_BASIC_INDICES = frozenset({int, torch.SymInt, slice, type(None), type(...)})


def item(tensor: torch.Tensor, key: object) -> torch.Tensor:
    """`tensor[key]` with each symbolic int of the key as a `select`: C++ would ask for its number."""
    items = key if type(key) is tuple else (key,)
    if ... in items:
        place = items.index(...)
        named = sum(1 for index in items if index is not None and index is not ...)
        items = (*items[:place], *[slice(None)] * (tensor.dim() - named), *items[place + 1 :])
    view = tensor[tuple(slice(None) if type(index) is torch.SymInt else index for index in items)]
    kept = [index for index in items if type(index) is not int]  # the dims of `view`, in order
    for dim in reversed(range(len(kept))):
        if type(kept[dim]) is torch.SymInt:
            view = view.select(dim, kept[dim])
    return view


def holds_symbol(data: object) -> bool:
    """Whether nested lists of numbers hold a symbol."""
    if isinstance(data, (list, tuple)):
        return any(map(holds_symbol, data))
    return is_symbolic(data)


def tensor(
    data: object,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """`torch.tensor` of nested lists of numbers, some of them symbols: put together of tensors of one number."""
    kind = dtype or (torch.get_default_dtype() if _holds_float(data) else torch.int64)
    made = _stacked(data, kind, device)
    return made.requires_grad_() if requires_grad else made


def _stacked(data: Any, dtype: torch.dtype, device: torch.device | str | None) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(item, dtype, device) for item in data])
    return torch.full((), data, dtype=dtype, device=device)


def _holds_float(data: object) -> bool:
    if isinstance(data, (list, tuple)):
        return any(map(_holds_float, data))
    return isinstance(data, (float, torch.SymFloat))


def only_numbers(data: object) -> bool:
    """Whether nested lists hold ints, floats and their symbols alone."""
    if isinstance(data, (list, tuple)):
        return bool(data) and all(map(only_numbers, data))
    return type(data) in (int, float, torch.SymInt, torch.SymFloat)
