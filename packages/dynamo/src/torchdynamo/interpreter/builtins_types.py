"""`type`, `isinstance`, `issubclass` and the making of classes."""

from __future__ import annotations

import builtins
from typing import Any

from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.builtin_rules import Args, Kwargs, Rules
from torchdynamo.interpreter.iterators import native_type
from torchdynamo.interpreter.protocol import InterpreterObject, World

RULES = Rules()


@RULES.interprets(type)
def call_type(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1 and not kwargs:
        return native_type(args[0])
    return world.call_leaf(type, args, kwargs)


@RULES.interprets(type.__call__)
def call_type_call(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.interpreter.instantiate(args[0], args[1:], kwargs)  # type: ignore[attr-defined]


@RULES.interprets(isinstance)
def call_isinstance(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return isinstance(*args, **kwargs)
    obj, classes = args
    if type(classes) is tuple:
        return any(call_isinstance(world, (obj, cls), {}) for cls in classes)
    if isinstance(obj, InterpreterObject) and obj.native is not object:
        return issubclass(obj.native, classes)
    if type(classes) is type or type(obj) is classes:
        return isinstance(obj, classes)
    check = python_method(type(classes), "__instancecheck__")
    if check is None or check.__module__ in ("abc", "typing"):
        return world.call_leaf(isinstance, args, {})
    return world.truth(world.call(check, (classes, obj), {}))


@RULES.interprets(issubclass)
def call_issubclass(world: World, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs:
        return issubclass(*args, **kwargs)
    cls, classes = args
    if type(classes) is tuple:
        return any(call_issubclass(world, (cls, one), {}) for one in classes)
    check = python_method(type(classes), "__subclasscheck__")
    if check is None or check.__module__ in ("abc", "typing"):
        return world.call_leaf(issubclass, args, {})
    return world.truth(world.call(check, (classes, cls), {}))


@RULES.interprets(callable)
def call_callable(world: World, args: Args, kwargs: Kwargs) -> Any:
    return callable(*args, **kwargs)


@RULES.interprets(builtins.__build_class__)
def call_build_class(world: World, args: Args, kwargs: Kwargs) -> Any:
    return world.build_class(args[0], args[1], args[2:], kwargs)
