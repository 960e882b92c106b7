"""Methods of containers that compare or hash their parts, and calls from C to a function among the arguments."""

from __future__ import annotations

import collections
import functools
from bisect import bisect_left, bisect_right, insort_left, insort_right
from collections.abc import Callable

from torchdynamo.interpreter.builtin_rules import BuiltinRule, Rules, callback
from torchdynamo.interpreter.iterators import Trampoline
from torchdynamo.interpreter.protocol import Args, Kwargs, World
from torchdynamo.interpreter.structural import hashes_python, runs_python, same_part, stored_key

RULES = Rules()


def _finds_key(method: object) -> BuiltinRule:
    """For a method of a dict or set whose first argument is a key."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if len(args) >= 2 and hashes_python(args[1]):
            args = (args[0], stored_key(world, args[0], args[1]), *args[2:])
        return world.call_leaf(method, args, kwargs)

    return rule


for _method in (dict.get, dict.pop, dict.setdefault, dict.__getitem__, dict.__setitem__, dict.__delitem__,
                dict.__contains__, set.add, set.discard, set.remove, set.__contains__, frozenset.__contains__,
                collections.OrderedDict.pop, collections.OrderedDict.setdefault, collections.OrderedDict.move_to_end,
                collections.OrderedDict.__setitem__, collections.OrderedDict.__delitem__):  # fmt: skip
    RULES[_method] = _finds_key(_method)


def _finds_part(method: object, found: Callable[..., object]) -> BuiltinRule:
    """For a method of a sequence that looks for an equal part; `found(sequence, places)` gives its result."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if len(args) == 2 and not kwargs and (runs_python(args[0], ("__eq__",)) or runs_python(args[1], ("__eq__",))):
            places = [i for i, part in enumerate(args[0]) if same_part(world, part, args[1])]
            return found(world, args[0], places)
        return world.call_leaf(method, args, kwargs)

    return rule


def _first(world: World, sequence: object, places: list[int]) -> int:
    if not places:
        raise ValueError("the value is not in the sequence")
    return places[0]


def _count(world: World, sequence: object, places: list[int]) -> int:
    return len(places)


def _remove(world: World, sequence: object, places: list[int]) -> None:
    if not places:
        raise ValueError("list.remove(x): x not in list")
    world.call_leaf(list.__delitem__, (sequence, places[0]), {})


for _searching, _found in ((list.index, _first), (tuple.index, _first), (list.count, _count), (tuple.count, _count),
                        (list.remove, _remove)):  # fmt: skip
    RULES[_searching] = _finds_part(_searching, _found)


def _bisection(native: Callable[..., object]) -> BuiltinRule:
    """Bisection calls `key`, and `<` of the parts, from C."""

    def rule(world: World, args: Args, kwargs: Kwargs) -> object:
        if any(runs_python(arg, ("__lt__",)) for arg in args[:2]):
            world.unsupported("c_function", f"{native.__name__} over objects with their own <")
        if kwargs.get("key") is not None:
            kwargs = {**kwargs, "key": callback(world, kwargs["key"])}
        return world.call_leaf(native, args, kwargs)

    return rule


for _native in (bisect_left, bisect_right, insort_left, insort_right):
    RULES[_native] = _bisection(_native)


@RULES.interprets(functools.cmp_to_key)
def call_cmp_to_key(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) == 1 and not kwargs and not isinstance(args[0], Trampoline):
        args = (Trampoline(world, args[0]),)
    return world.call_leaf(functools.cmp_to_key, args, kwargs)
