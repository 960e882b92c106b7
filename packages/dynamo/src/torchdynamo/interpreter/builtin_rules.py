"""The form of a rule for C code that calls back into Python, and what such code is given in place of the program's
objects.

A rule has the signature `(world, args, kwargs)` and does what the C function does, calling back through the world.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.iterators import InterpretedNext, Trampoline
from torchdynamo.interpreter.protocol import Args, InterpreterObject, Kwargs, World

BuiltinRule = Callable[[World, Args, Kwargs], object]


class Rules(dict[object, BuiltinRule]):
    """Rules of one domain, by the function or class that each stands for."""

    def interprets(self, *targets: object) -> Callable[[BuiltinRule], BuiltinRule]:
        """Makes a function the rule of these built-in functions: `rule(world, args, kwargs)`."""

        def register(rule: BuiltinRule) -> BuiltinRule:
            self.update(dict.fromkeys(targets, rule))
            return rule

        return register


def native_iterator(world: World, obj: object) -> Iterator[Any]:
    """An iterator over `obj` that C code may consume: Python code behind it is interpreted."""
    iterator: Iterator[object] = world.iterate(obj)
    if isinstance(iterator, InterpreterObject) or not may_change(type(iterator)):
        return iterator
    return InterpretedNext(world, iterator)


def consumable(world: World, obj: object) -> object:
    """`obj` itself when C code iterates it without running Python, else an iterator."""
    kind = type(obj)
    if not may_change(kind) or isinstance(obj, InterpreterObject):
        return obj
    names = ("__iter__", "__next__") if hasattr(kind, "__iter__") else ("__getitem__",)
    runs_python = any(python_method(kind, name) is not None for name in names)
    return native_iterator(world, obj) if runs_python else obj


def callback(world: World, fn: object) -> object:
    """`fn` itself when C code may call it directly, else a callable that interprets it."""
    if fn is None or type(fn) is types.BuiltinFunctionType or isinstance(fn, Trampoline):
        return fn
    return Trampoline(world, fn)
