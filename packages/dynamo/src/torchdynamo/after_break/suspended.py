"""Suspended generators: they run `finally` blocks and exits of `with` blocks where the program gives them up.

CPython closes a generator when its last reference goes. So code behind a break is handed a generator even where it
only has to be kept, and where the program gives up one that an earlier part of it has started for real, the graph ends.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchdynamo.interpreter.generators import InterpretedGenerator
from torchdynamo.interpreter.iterators import EnumerateIterator, FilterIterator, MapIterator, ZipIterator
from torchdynamo.interpreter.state import CLOSED, FrameState
from torchdynamo.outside.externals import Externals
from torchdynamo.reasons import BreakGraph
from torchdynamo.sources import Argument, Attribute, Item, Source, base_of


def refuse_coroutines(fn: Any) -> None:
    """Breaks at a call that makes what `async def` makes, or is a method of it."""
    if isinstance(fn, types.FunctionType) and fn.__code__.co_flags & (
        inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    ):
        raise BreakGraph("coroutine", f"{fn.__qualname__}() is an async def")
    if isinstance(getattr(fn, "__self__", None), _COROUTINES):
        raise BreakGraph("coroutine", f"{fn.__name__}() of {fn.__self__.__qualname__}()")


_COROUTINES = (types.CoroutineType, types.AsyncGeneratorType)


def closes(value: object) -> bool:
    """Whether giving up the value may close a generator that has started."""
    return next(_started(value), None) is not None


def _started(value: Any) -> Iterator[object]:
    """The generators that may be suspended among the parts of a value that are only its own."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind is types.GeneratorType:
            yield value
        elif kind is InterpretedGenerator:
            if value.gi_frame is not None:  # what breaks the graph may start it
                yield value
        elif kind in _PARTS and id(value) not in seen:
            seen.add(id(value))
            todo += _PARTS[kind](value)


_PARTS: dict[type, Any] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    dict: dict.values,
    EnumerateIterator: lambda value: (value.iterator,),
    FilterIterator: lambda value: (value.iterator,),
    MapIterator: lambda value: value.iterators,
    ZipIterator: lambda value: value.iterators,
}


def given_up(values: Iterable[object], frames: Sequence[FrameState], externals: Externals) -> Any:
    """A generator of an earlier part of the program that closes where the innermost frame lets go of `values`."""
    values = list(values)
    for value in values:
        if type(value) not in CLOSED:
            continue
        leaving = sum(other is value for other in values)
        held = sum(other is value for frame in frames for part in (frame.stack, frame.fast) for other in part)
        if held > leaving:
            continue
        for generator in _started(value):
            known = externals.lookup(generator)
            if known is not None and _is_handed_on(known.source):
                return generator
    return None


def _is_handed_on(source: Source) -> bool:
    """Whether it was reached through what the code before a break hands on, and through iterators."""
    step: Source | None = source
    while isinstance(step, (Item, Attribute)):
        step = base_of(step)
    return isinstance(step, Argument)
