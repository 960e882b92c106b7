"""`type`, `isinstance`, `issubclass` and the making of classes."""

from __future__ import annotations

import builtins
import copyreg

from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.builtin_rules import Rules
from torchdynamo.interpreter.classes import is_python_class, may_change
from torchdynamo.interpreter.iterators import native_type
from torchdynamo.interpreter.protocol import Args, InterpreterObject, Kwargs, World

RULES = Rules()


@RULES.interprets(type)
def call_type(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) == 1 and not kwargs:
        return native_type(args[0])
    return world.call_leaf(type, args, kwargs)


@RULES.interprets(type.__call__)
def call_type_call(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.interpreter.instantiate(args[0], args[1:], kwargs)


@RULES.interprets(isinstance)
def call_isinstance(world: World, args: Args, kwargs: Kwargs) -> object:
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
def call_issubclass(world: World, args: Args, kwargs: Kwargs) -> object:
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
def call_callable(world: World, args: Args, kwargs: Kwargs) -> object:
    return callable(*args, **kwargs)


@RULES.interprets(builtins.__build_class__)
def call_build_class(world: World, args: Args, kwargs: Kwargs) -> object:
    return world.build_class(args[0], args[1], args[2:], kwargs)


# -- copies ------------------------------------------------------------------------------------


@RULES.interprets(object.__reduce_ex__)
def call_reduce_ex(world: World, args: Args, kwargs: Kwargs) -> object:
    """What an object without a `__reduce__` of its own is copied from: its class, its attributes, its parts."""
    obj = args[0]
    cls = type(obj)
    own = python_method(cls, "__reduce__")
    if own is not None:
        return world.call(own, (obj,), {})
    plain = all(is_python_class(base) or base in (object, list, dict) for base in cls.__mro__)
    if not plain or not may_change(cls) or isinstance(obj, InterpreterObject) or args[1:] < (2,):
        return world.call_leaf(object.__reduce_ex__, args, kwargs)
    made: tuple[object, ...] = copyreg.__newobj__, (cls,)  # type: ignore[attr-defined]
    for name in ("__getnewargs_ex__", "__getnewargs__"):
        method = python_method(cls, name)
        if method is not None:
            given = world.call(method, (obj,), {})
            if name == "__getnewargs__":
                made = copyreg.__newobj__, (cls, *given)  # type: ignore[attr-defined]
            else:
                made = copyreg.__newobj_ex__, (cls, *given)  # type: ignore[attr-defined]
            break
    items = world.iterate(obj) if isinstance(obj, list) else None
    pairs = world.iterate(world.call(world.getattr(obj, "items"), (), {})) if isinstance(obj, dict) else None
    return (*made, _state(world, obj, cls), items, pairs)


def _state(world: World, obj: object, cls: type) -> object:
    method = python_method(cls, "__getstate__")
    if method is not None:
        return world.call(method, (obj,), {})
    attributes = world.getattr(obj, "__dict__") if hasattr(obj, "__dict__") else None
    slots = {}
    for name in copyreg._slotnames(cls):  # type: ignore[attr-defined]
        try:
            slots[name] = world.getattr(obj, name)
        except AttributeError:
            continue
    if slots:
        return attributes or None, slots
    return attributes or None
