"""Iterators over the program's own objects, whose state can be read and built again.

Each class has fields that say where it stands, and yields what CPython's iterator of the same name would.
"""

from __future__ import annotations

import collections
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchdynamo.interpreter.protocol import InterpreterObject, World


class LocalIterator(InterpreterObject):
    """Base of the iterators that the interpreter makes."""

    __slots__ = ()

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        raise NotImplementedError


class SequenceIterator(LocalIterator):
    """Over a list, tuple, str, bytes or range: `index` is the position of the next item, -1 at the end."""

    __slots__ = ("index", "native", "sequence")

    def __init__(self, sequence: Any, index: int = 0) -> None:
        self.sequence = sequence
        self.index = index
        self.native = type(iter(sequence))

    def __next__(self) -> object:
        index = self.index
        if 0 <= index < len(self.sequence):
            self.index = index + 1
            return self.sequence[index]
        self.index = -1
        raise StopIteration

    def __length_hint__(self) -> int:
        return max(len(self.sequence) - self.index, 0) if self.index >= 0 else 0


class MappingIterator(LocalIterator):
    """Over a dict, a `view` of one ("keys", "values", "items") or a set: `consumed` items were handed out, and that
    there are no more has been said where it is `over`."""

    __slots__ = ("consumed", "container", "inner", "native", "over", "view")

    def __init__(self, iterable: Any, view: str | None = None, consumed: int = 0) -> None:
        self.container, self.view = iterable, view
        if type(iterable) in _DICT_VIEWS:
            self.container, self.view = gc.get_referents(iterable)[0], _DICT_VIEWS[type(iterable)]
        self.consumed, self.over = 0, False
        self.start()
        self.native = type(self.inner)
        for _ in range(consumed):
            next(self)

    def start(self) -> None:
        """Makes the iterator beneath: anew, as far as `consumed` says."""
        base = collections.OrderedDict if isinstance(self.container, collections.OrderedDict) else dict
        view = self.container if self.view is None else getattr(base, self.view)(self.container)
        self.inner = iter(view)
        for _ in range(self.consumed):
            next(self.inner)

    def __next__(self) -> object:
        try:
            value = next(self.inner)
        except StopIteration:
            self.over = True
            raise
        self.consumed += 1
        return value

    def __length_hint__(self) -> int:
        return getattr(self.inner, "__length_hint__", lambda: 0)()

    @property
    def outlived(self) -> bool:
        """Whether what it goes over has grown or shrunk since, or it is over."""
        return self.over or self.__length_hint__() + self.consumed != len(self.container)


class _ByIndex(LocalIterator):
    """Asks the world for one item after the other; `index` is the place of the next one, -1 at the end."""

    __slots__ = ()
    step = 1
    world: World
    sequence: object
    index: int

    def __next__(self) -> object:
        if self.index < 0:
            raise StopIteration
        try:
            value = self.world.getitem(self.sequence, self.index)
        except (IndexError, StopIteration):
            self.index = -1
            raise StopIteration from None
        self.index += self.step
        return value


class _Indexed:
    """What has no other way to be gone over."""

    def __getitem__(self, index: int) -> object:
        raise IndexError(index)


class GetitemIterator(_ByIndex):
    """Over an object that has `__getitem__` only."""

    native = type(iter(_Indexed()))
    __slots__ = ("index", "sequence", "world")

    def __init__(self, world: World, sequence: object) -> None:
        self.world = world
        self.sequence = sequence
        self.index = 0


class CallableIterator(LocalIterator):
    """`iter(fn, sentinel)`."""

    native = type(iter(int, 1))
    __slots__ = ("done", "fn", "sentinel", "world")

    def __init__(self, world: World, fn: object, sentinel: object) -> None:
        self.world, self.fn, self.sentinel, self.done = world, fn, sentinel, False

    def __next__(self) -> object:
        if not self.done:
            value = self.world.call(self.fn, (), {})
            if value is not self.sentinel and not self.world.truth(self.world.compare("==", self.sentinel, value)):
                return value
            self.done = True
        raise StopIteration


class MapIterator(LocalIterator):
    """`map(fn, *iterators)`."""

    __slots__ = ("fn", "iterators", "world")
    native = map

    def __init__(self, world: World, fn: object, iterators: tuple[object, ...]) -> None:
        self.world, self.fn, self.iterators = world, fn, iterators

    def __next__(self) -> object:
        advance = self.world.advance
        return self.world.call(self.fn, tuple([advance(iterator) for iterator in self.iterators]), {})


class FilterIterator(LocalIterator):
    """`filter(fn, iterator)`; `fn` is None or bool for the truth of the items."""

    __slots__ = ("fn", "iterator", "keep", "world")
    native = filter

    def __init__(self, world: World, fn: object, iterator: object, keep: bool = True) -> None:
        self.world, self.fn, self.iterator, self.keep = world, fn, iterator, keep

    def __next__(self) -> object:
        world = self.world
        while True:
            value = world.advance(self.iterator)
            test = value if self.fn is None or self.fn is bool else world.call(self.fn, (value,), {})
            if world.truth(test) is self.keep:
                return value


class ZipIterator(LocalIterator):
    """`zip(*iterators, strict=strict)`."""

    __slots__ = ("iterators", "strict", "world")
    native = zip

    def __init__(self, world: World, iterators: tuple[object, ...], strict: bool = False) -> None:
        self.world, self.iterators, self.strict = world, iterators, strict

    def __next__(self) -> object:
        if not self.iterators:
            raise StopIteration
        values: list[object] = []
        for place, iterator in enumerate(self.iterators):
            try:
                values.append(self.world.advance(iterator))
            except StopIteration:
                if self.strict:
                    self._check(place)
                raise
        return tuple(values)

    def _check(self, place: int) -> None:
        """Iterator number `place` is at its end: are the ones before it longer, or those after it?"""
        if place:
            raise ValueError(f"zip() argument {place + 1} is shorter than argument{_upto(place)}")
        for other, iterator in enumerate(self.iterators[1:], 1):
            try:
                self.world.advance(iterator)
            except StopIteration:
                continue
            raise ValueError(f"zip() argument {other + 1} is longer than argument{_upto(other)}")


def _upto(count: int) -> str:
    return " 1" if count == 1 else f"s 1-{count}"


class EnumerateIterator(LocalIterator):
    """`enumerate(iterator, start)`; `count` is the next number."""

    __slots__ = ("count", "iterator", "world")
    native = enumerate

    def __init__(self, world: World, iterator: object, count: Any = 0) -> None:
        self.world, self.iterator, self.count = world, iterator, count

    def __next__(self) -> object:
        value = self.world.advance(self.iterator)
        count = self.count
        self.count = count + 1
        return (count, value)


class ReversedIterator(_ByIndex):
    """`reversed(sequence)`; `index` is the position of the next item, -1 at the end."""

    __slots__ = ("index", "native", "sequence", "world")
    step = -1

    def __init__(self, world: World, sequence: object, length: int, native: type = reversed) -> None:
        self.world, self.sequence, self.index, self.native = world, sequence, length - 1, native


class Rounds(LocalIterator):
    """An iterator of a loop that is compiled round by round: it is advanced for real, between one round and the next.

    Attributes:
        iterator: CPython's own; during capture a `Start`, which says what is to be iterated over.
        over: what the loop is over, for the ledger.
        reason: why the graph ends at its head, likewise.
    """

    __slots__ = ("iterator", "over", "reason")

    def __init__(self, iterator: Any, over: str, reason: str) -> None:
        self.iterator, self.over, self.reason = iterator, over, reason

    @property
    def native(self) -> type:  # type: ignore[override]
        """That of CPython's own."""
        return self.iterator.native if isinstance(self.iterator, Start) else type(self.iterator)

    @property
    def is_ahead(self) -> bool:
        """Whether its next round is captured with what is in front of the loop."""
        return isinstance(self.iterator, Start) and self.iterator.taken < self.iterator.ahead

    def __next__(self) -> object:
        return next(self.iterator)


@dataclass(eq=False, slots=True)
class Start:
    """What begins an iterator: `iter` or `reversed`, of what the program iterates over. Whoever advances it is told by
    `refuse`, which raises, that there is none yet.

    Attributes:
        ahead: of how many items the rounds are captured before that, with what is in front of the loop.
        taken: how many it has handed out.
    """

    begin: Callable[[Any], object]
    iterable: Any
    refuse: Callable[[Start], object]
    ahead: int = 0
    taken: int = 0

    def __next__(self) -> object:
        if self.taken == self.ahead:
            return self.refuse(self)
        item = next(itertools.islice(self.iterable, self.taken, None))
        self.taken += 1
        return item

    @property
    def native(self) -> type:
        """The type of the iterator that it begins."""
        return type(self.begin(_EMPTY.get(native_type(self.iterable), ())))


class InterpretedNext(LocalIterator):
    """An iterator with a Python `__next__`, for C code that consumes it."""

    __slots__ = ("iterator", "world")

    def __init__(self, world: World, iterator: object) -> None:
        self.world, self.iterator = world, iterator

    def __next__(self) -> object:
        return self.world.advance(self.iterator)


class Trampoline(InterpreterObject):
    """A Python callable that C code calls: the call is interpreted."""

    __slots__ = ("fn", "world")

    def __init__(self, world: World, fn: object) -> None:
        self.world, self.fn = world, fn

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.world.call(self.fn, args, kwargs)


# An empty one of what loops of another number of rounds at each call are over; a tensor's rows are a tuple.
_EMPTIES: tuple[Any, ...] = ([], {}, range(0), {}.keys(), {}.values(), {}.items())
_EMPTY = {type(empty): empty for empty in _EMPTIES}
_SEQUENCES: frozenset[type] = frozenset({list, tuple, range, str, bytes})
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_DICT_VIEWS: dict[type, str] = {
    type(getattr(kind(), view)()): view for kind in _MAPPINGS for view in ("keys", "values", "items")
}
_VIEWS: frozenset[type] = frozenset({*_MAPPINGS, set, frozenset, *_DICT_VIEWS})


def local_iterator(obj: object) -> LocalIterator | None:
    """Our iterator for a built-in container; None when `obj` is something else."""
    kind = type(obj)
    if kind in _SEQUENCES:
        return SequenceIterator(obj)
    if kind in _VIEWS:
        return MappingIterator(obj)
    return None


def native_type(value: object) -> type:
    """`type(value)`, as the program should see it."""
    if isinstance(value, InterpreterObject) and value.native is not object:
        return value.native
    return type(value)


def is_iterable(value: object) -> bool:
    """Whether `iter(value)` gets as far as calling something."""
    kind = type(value)
    if hasattr(kind, "__iter__"):
        return kind.__iter__ is not None
    return hasattr(kind, "__getitem__")
