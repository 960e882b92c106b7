"""C functions that iterate, sort or fold: their iterators and callbacks go through the world."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable
from typing import Any

from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.builtin_rules import BuiltinRule, Rules, callback, consumable, native_iterator
from torchdynamo.interpreter.builtins_conversions import number_of
from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.iterators import (
    CallableIterator,
    EnumerateIterator,
    FilterIterator,
    MapIterator,
    ReversedIterator,
    Trampoline,
    ZipIterator,
)
from torchdynamo.interpreter.protocol import MISSING, Args, InterpreterObject, Kwargs, World
from torchdynamo.interpreter.structural import runs_python

RULES = Rules()


@RULES.interprets(map)
def call_map(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) < 2 or kwargs:
        return map(*args, **kwargs)
    return MapIterator(world, args[0], tuple(world.iterate(arg) for arg in args[1:]))


@RULES.interprets(filter)
def call_filter(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 2 or kwargs:
        return filter(*args, **kwargs)
    return FilterIterator(world, args[0], world.iterate(args[1]))


@RULES.interprets(zip)
def call_zip(world: World, args: Args, kwargs: Kwargs) -> object:
    if kwargs.keys() - {"strict"}:
        return zip(*args, **kwargs)  # noqa: B905 - raises
    iterators = [world.iterate(arg) for arg in args]
    return ZipIterator(world, tuple(iterators), world.truth(kwargs.get("strict", False)))


@RULES.interprets(enumerate)
def call_enumerate(world: World, args: Args, kwargs: Kwargs) -> object:
    if not 1 <= len(args) <= 2 or kwargs.keys() - {"start"} or (len(args) == 2 and kwargs):
        return enumerate(*args, **kwargs)
    start = args[1] if len(args) == 2 else kwargs.get("start", 0)
    first: Any = number_of(world, start, operator.index, "__index__")
    return EnumerateIterator(world, world.iterate(args[0]), operator.index(first))


@RULES.interprets(reversed)
def call_reversed(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 1 or kwargs:
        return reversed(*args, **kwargs)
    obj = args[0]
    method = python_method(type(obj), "__reversed__")
    if method is not None:
        return world.call(method, (obj,), {})
    if type(obj) in (list, tuple, range, str):
        return ReversedIterator(world, obj, len(obj), type(reversed(obj)))
    if python_method(type(obj), "__getitem__") is not None:
        length: Any = world.call(len, (obj,), {})
        return ReversedIterator(world, obj, length)
    return world.call_leaf(reversed, args, kwargs)


_PARTIAL_PARTS = {name: vars(functools.partial)[name] for name in ("func", "args", "keywords")}


@RULES.interprets(functools.partial.__call__)
def call_partial(world: World, args: Args, kwargs: Kwargs) -> object:
    """An object of a class made from `partial`, which keeps what it is called with itself."""
    partial, kind = args[0], type(args[0])
    if not all(getattr(kind, name, None) is part for name, part in _PARTIAL_PARTS.items()):
        return world.call_leaf(functools.partial.__call__, args, kwargs)
    function, first, keywords = (world.descriptor_get(part, partial, kind) for part in _PARTIAL_PARTS.values())
    return world.call(function, (*first, *args[1:]), {**keywords, **kwargs})  # type: ignore[misc,dict-item]


@RULES.interprets(iter)
def call_iter(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) == 1 and not kwargs:
        return world.iterate(args[0])
    if len(args) == 2 and not kwargs and callable(args[0]):
        return CallableIterator(world, *args)
    return iter(*args, **kwargs)


@RULES.interprets(next)
def call_next(world: World, args: Args, kwargs: Kwargs) -> object:
    if not 1 <= len(args) <= 2 or kwargs:
        return next(*args, **kwargs)
    if not hasattr(type(args[0]), "__next__"):
        raise TypeError(f"'{type(args[0]).__name__}' object is not an iterator")
    try:
        return world.advance(args[0])
    except StopIteration:
        if len(args) == 2:
            return args[1]
        raise


def _consumer(target: object) -> BuiltinRule:
    """For a C function whose first argument is iterated."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if args:
            args = (consumable(world, args[0]), *args[1:])
        return world.call_leaf(target, args, kwargs)

    return rule


for _target in (list, tuple, set, frozenset, collections.deque, dict.fromkeys, math.prod, math.fsum, itertools.tee):
    RULES[_target] = _consumer(_target)


def _method_consumer(method: object) -> BuiltinRule:
    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        return world.call_leaf(method, (*args[:1], *(consumable(world, arg) for arg in args[1:])), kwargs)

    return rule


_CONSUMING_METHODS: tuple[object, ...] = (
    list.extend, list.__init__, set.update, set.__init__, str.join, bytes.join, set.union, set.intersection,
    set.difference, set.intersection_update, set.difference_update, set.symmetric_difference,
    set.symmetric_difference_update, set.issubset, set.issuperset, set.isdisjoint, collections.deque.__init__,
    collections.deque.extend, collections.deque.extendleft, collections._count_elements,  # type: ignore[attr-defined]
)  # fmt: skip
for _method in _CONSUMING_METHODS:
    RULES[_method] = _method_consumer(_method)


@RULES.interprets(dict)
def call_dict(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.call_leaf(dict, tuple(_mapping_source(world, arg) for arg in args), kwargs)


@RULES.interprets(dict.update)
def call_dict_update(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.call_leaf(dict.update, (*args[:1], *(_mapping_source(world, a) for a in args[1:])), kwargs)


@RULES.interprets(dict.__init__)
def call_dict_init(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.call_leaf(dict.__init__, (*args[:1], *(_mapping_source(world, a) for a in args[1:])), kwargs)


def _mapping_source(world: World, obj: object) -> object:
    """What `dict` reads: a mapping with Python methods becomes a dict, other iterables an iterator."""
    kind = type(obj)
    if not may_change(kind) or isinstance(obj, InterpreterObject):
        return obj
    if not hasattr(kind, "keys"):
        return consumable(world, obj)
    if python_method(kind, "keys") is None and python_method(kind, "__getitem__") is None:
        return obj
    if isinstance(obj, dict) and python_method(kind, "__iter__") is None:
        return obj
    keys = native_iterator(world, world.call(world.getattr(obj, "keys"), (), {}))
    return {key: world.getitem(obj, key) for key in keys}


@RULES.interprets(sum)
def call_sum(world: World, args: Args, kwargs: Kwargs) -> object:
    if not 1 <= len(args) <= 2 or kwargs.keys() - {"start"} or (len(args) == 2 and kwargs):
        return sum(*args, **kwargs)
    total = args[1] if len(args) == 2 else kwargs.get("start", 0)
    values = list(native_iterator(world, args[0]))
    if isinstance(total, (str, bytes, bytearray)) or all(type(v) in (int, float, bool) for v in (total, *values)):
        return sum(values, total)  # C adds floats with compensation since 3.12
    for value in values:
        total = world.binary("+", total, value)
    return total


@RULES.interprets(any)
def call_any(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 1 or kwargs:
        return any(*args, **kwargs)
    return any(world.truth(value) for value in native_iterator(world, args[0]))


@RULES.interprets(all)
def call_all(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 1 or kwargs:
        return all(*args, **kwargs)
    return all(world.truth(value) for value in native_iterator(world, args[0]))


def _extremum(native: Callable[..., object], op: str) -> BuiltinRule:
    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if not args or kwargs.keys() - {"key", "default"} or (len(args) > 1 and "default" in kwargs):
            return native(*args, **kwargs)
        key = kwargs.get("key")
        values = args if len(args) > 1 else list(native_iterator(world, args[0]))
        if not values:
            return native(values, **kwargs)
        best: object = MISSING
        best_key: object = None
        for value in values:
            value_key = value if key is None else world.call(key, (value,), {})
            if best is MISSING:
                best, best_key = value, value_key
                continue
            chosen = world.choose(op, (value, best), (value_key, best_key))
            if chosen is not None:
                best, best_key = chosen
            elif world.truth(world.compare(op, value_key, best_key)):
                best, best_key = value, value_key
        return best

    return rule


RULES[max] = _extremum(max, ">")
RULES[min] = _extremum(min, "<")


class SortItem(InterpreterObject):
    """A value under comparison by C code; `<` is asked of the world."""

    __slots__ = ("value", "world")

    def __init__(self, world: World, value: object) -> None:
        self.world, self.value = world, value

    def __lt__(self, other: SortItem) -> bool:
        return self.world.truth(self.world.compare("<", self.value, other.value))


_ORDER = ("__lt__", "__eq__")


def _sort_key(world: World, key: object, values: list[object]) -> Callable[[object], Any] | None:
    """The `key` for the native sort: None when it needs none."""
    if key is None:
        if any(runs_python(value, _ORDER) for value in values):
            return lambda value: SortItem(world, value)
        return None

    def native_key(value: object) -> object:
        result = world.call(key, (value,), {})
        return SortItem(world, result) if runs_python(result, _ORDER) else result

    return native_key


@RULES.interprets(sorted)
def call_sorted(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 1 or kwargs.keys() - {"key", "reverse"}:
        return sorted(*args, **kwargs)
    values, key = list(native_iterator(world, args[0])), kwargs.get("key")
    keys = values if key is None else [world.call(key, (value,), {}) for value in values]
    reverse: Any = kwargs.get("reverse", False)
    found = world.order(values, keys, reverse)
    if found is not None:
        return found
    if any(runs_python(one, _ORDER) for one in keys):
        keys = [SortItem(world, one) for one in keys]
    by_key: Callable[[int], Any] = keys.__getitem__
    return [values[place] for place in sorted(range(len(values)), key=by_key, reverse=reverse)]


@RULES.interprets(list.sort)
def call_list_sort(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 1 or kwargs.keys() - {"key", "reverse"} or not isinstance(args[0], list):
        return list.sort(*args, **kwargs)
    key = _sort_key(world, kwargs.get("key"), args[0])
    return world.call_leaf(list.sort, args, {**kwargs, "key": key})


@RULES.interprets(functools.reduce)
def call_reduce(world: World, args: Args, kwargs: Kwargs) -> object:
    if not 2 <= len(args) <= 3 or kwargs:
        return functools.reduce(*args, **kwargs)
    iterator = native_iterator(world, args[1])
    if len(args) == 3:
        total = args[2]
    else:
        total = next(iterator, MISSING)
        if total is MISSING:
            raise TypeError("reduce() of empty iterable with no initial value")
    for value in iterator:
        total = world.call(args[0], (total, value), {})
    return total


class GroupKey(Trampoline):
    """The `key` of `itertools.groupby`, or None: it compares each result with the one before."""

    __slots__ = ()

    def __call__(self, value: object) -> object:  # type: ignore[override]
        result = value if self.fn is None else self.world.call(self.fn, (value,), {})
        if runs_python(result, ("__eq__",)):
            self.world.unsupported("c_function", "itertools.groupby over objects with their own ==")
        self.world.tell_apart(result)
        return result


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, type)
_ITERATED = ("iterable", "data", "selectors")
_CALLED = ("func", "function", "predicate")


def itertools_call(world: World, cls: type, args: Args, kwargs: Kwargs) -> object:
    """An itertools object over what the world iterates; functions among the arguments are interpreted."""
    if cls in (itertools.repeat, itertools.count):
        return world.call_leaf(cls, args, kwargs)
    if cls is itertools.groupby and args:
        key = args[1] if len(args) == 2 else kwargs.get("key")
        return world.call_leaf(cls, (consumable(world, args[0]), GroupKey(world, key)), {})

    def named(name: str, value: object) -> object:
        """Others, as `initial` and `fillvalue`, are values like those that are iterated over."""
        if name in _CALLED:
            return callback(world, value)
        return consumable(world, value) if name in _ITERATED else value

    given = [callback(world, arg) if isinstance(arg, _FUNCTIONS) else consumable(world, arg) for arg in args]
    return world.call_leaf(cls, tuple(given), {name: named(name, value) for name, value in kwargs.items()})
