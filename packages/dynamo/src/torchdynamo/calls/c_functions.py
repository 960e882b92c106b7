"""What functions of C do with their arguments: which methods they call, what they compare, hash or only keep."""

from __future__ import annotations

import collections
import copy
import operator
import types
from typing import TYPE_CHECKING, Any

from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.builtins_conversions import is_of_program
from torchdynamo.reasons import BreakGraph

if TYPE_CHECKING:
    from torchdynamo.outside.outside import Outside


def only_keeps(fn: object) -> bool:
    """A C function that asks no more of its arguments than what they are, or puts them into a container."""
    if any(fn is one for one in _QUESTIONS_OF_TYPE):  # by identity: what is asked may have its own ==
        return True
    if not isinstance(fn, types.BuiltinFunctionType) or not isinstance(fn.__self__, _CONTAINERS):
        return False
    return fn.__name__ not in _BY_PLACES or not isinstance(fn.__self__, (list, collections.deque))


_BY_PLACES = frozenset({"insert", "pop", "rotate"})


def keeps_texts(fn: object) -> bool:
    """A C function that asks no texts what they are; where it hashes or compares them, they say so themselves."""
    return only_keeps(fn) or (isinstance(fn, types.MethodDescriptorType) and fn.__objclass__ in _CONTAINERS)


def only_puts(fn: object) -> bool:
    """A method of a container that keeps what it is given as it is, and goes over none of it."""
    if not isinstance(fn, (types.BuiltinFunctionType, types.MethodDescriptorType)) or fn.__name__ not in _PUTS:
        return False
    owner = fn.__objclass__ if isinstance(fn, types.MethodDescriptorType) else type(fn.__self__)
    return issubclass(owner, _CONTAINERS)


def asks(outside: Outside, fn: object, *objects: object) -> None:
    """Breaks where C code looks into an object that no guard can watch, or would have a method in Python tell it a
    number or a path: what that reads, nobody sees. A method's own object is not asked."""
    outside.refuse_opaque(*objects)
    if isinstance(fn, (types.WrapperDescriptorType, types.MethodWrapperType)):  # operators leave others to their own
        return
    own = objects[:1] if isinstance(fn, types.MethodDescriptorType) else ()
    for obj in objects[len(own) :]:
        for one in (obj, *obj) if type(obj) in (list, tuple) else (obj,):
            if is_of_program(one) and _tells_by_python(one):
                raise BreakGraph("c_function", f"{getattr(fn, '__qualname__', fn)} asks a {type(one).__qualname__}")


def _tells_by_python(obj: object) -> bool:
    return not isinstance(obj, _PLAIN) and any(python_method(type(obj), name) is not None for name in _TELLING)


_PLAIN = (int, float, complex, str, bytes, type)
_TELLING = ("__index__", "__float__", "__fspath__", "__complex__", "__floor__", "__ceil__", "__trunc__")


def compared(fn: Any, args: tuple[Any, ...]) -> tuple[object, ...]:
    """Which arguments of a C function are hashed, or compared with each other."""
    if any(fn is kind for kind in _MADE_OF_KEYS):
        return args
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, dict) or (isinstance(owner, type) and issubclass(owner, dict)):  # a method, or `fromkeys`
        return args
    if isinstance(owner, (*SETS, list, tuple, collections.deque)):
        return (owner, *args) if isinstance(owner, SETS) or fn.__name__ in _SEARCHES else ()
    kind = getattr(fn, "__objclass__", None)
    if isinstance(kind, type) and args:
        if issubclass(kind, dict):
            return args[1:]
        return args if issubclass(kind, SETS) or fn.__name__ in _SEARCHES else ()
    return args if any(fn is one for one in _SEARCHING_FUNCTIONS) else ()


# What built-in functions ask of their argument, by the function's identity.
ASKED_METHODS: dict[int, tuple[str, ...]] = {
    id(function): names
    for function, *names in (
        (len, "__len__"), (bool, "__bool__", "__len__"), (int, "__int__", "__index__", "__trunc__"),
        (float, "__float__", "__index__"), (complex, "__complex__", "__float__", "__index__"), (hash, "__hash__"),
        (str, "__str__", "__repr__"), (repr, "__repr__"), (format, "__format__", "__str__", "__repr__"),
        (abs, "__abs__"), (round, "__round__"), (iter, "__iter__", "__getitem__"), (next, "__next__"),
        (list, "__iter__", "__getitem__"), (tuple, "__iter__", "__getitem__"), (set, "__iter__", "__getitem__"),
        (dict, "keys", "__iter__", "__getitem__"), (sum, "__iter__"), (min, "__iter__"), (max, "__iter__"),
        (sorted, "__iter__"), (reversed, "__reversed__", "__len__", "__getitem__"), (divmod, "__divmod__"),
        (pow, "__pow__"), (callable, "__call__"), (copy.copy, "__copy__", "__reduce_ex__"),
        (copy.deepcopy, "__deepcopy__", "__reduce_ex__"), (enumerate, "__iter__"), (zip, "__iter__"),
    )
}  # fmt: skip
_CONTAINERS = (list, set, dict, collections.deque)
_PUTS = frozenset({"append", "appendleft", "insert", "add", "setdefault", "__setitem__"})
SETS: tuple[type, ...] = (set, frozenset, type({}.keys()), type({}.items()))
_MADE_OF_KEYS: tuple[object, ...] = (set, frozenset, dict, collections.OrderedDict, collections.defaultdict)
_SEARCHES = frozenset({"index", "count", "remove", "__contains__", "__eq__", "__ne__"})
_SEARCHING_FUNCTIONS: list[object] = [
    operator.eq, operator.ne, operator.contains, operator.countOf, operator.indexOf,
    collections._count_elements,  # type: ignore[attr-defined]  # of Counter
]  # fmt: skip
_QUESTIONS_OF_TYPE: list[object] = [isinstance, issubclass, callable, id]
