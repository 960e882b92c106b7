"""The attribute protocol: descriptors, `__getattr__`, `__getattribute__`, classes, modules and `super()`.

Python code on the way (properties, hooks, descriptors) is called through the world, and storage is read and
written by the world's primitives, so that every world has one and the same protocol.
"""

from __future__ import annotations

import collections
import functools
import types
from typing import Any

from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.protocol import MISSING, InterpreterObject, World

# The lookup that `object` defines, and the names under which built-in bases have the same one.
_GENERIC_GETATTRIBUTE: frozenset[object] = frozenset(
    base.__getattribute__
    for base in (object, list, dict, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, bool, range,
                 BaseException, collections.deque, collections.OrderedDict, collections.defaultdict,
                 types.SimpleNamespace, functools.partial)
)  # fmt: skip
_object_getattribute: object = object.__getattribute__
_type_getattribute: object = type.__getattribute__
_object_setattr: object = object.__setattr__
_type_setattr: object = type.__setattr__
_object_delattr: object = object.__delattr__
_type_delattr: object = type.__delattr__
_Function = types.FunctionType


def is_python(value: object) -> bool:
    """A function whose body is bytecode."""
    return type(value) is _Function


def load_attribute(world: World, obj: object, name: str) -> object:
    """`obj.name`."""
    cls = type(obj)
    getattribute = cls.__getattribute__
    if getattribute is _object_getattribute or getattribute in _GENERIC_GETATTRIBUTE:
        if not may_change(cls) or isinstance(obj, InterpreterObject):
            return world.leaf_getattr(obj, name)
        value = instance_attribute(world, obj, name)
    elif type(getattribute) is _Function:
        try:
            return world.call(getattribute, (obj, name), {})
        except AttributeError as error:
            return _fallback(world, obj, cls, name, error)
    elif getattribute is _type_getattribute and isinstance(obj, type):
        value = type_attribute(world, obj, name)
    elif issubclass(cls, types.ModuleType):
        value = module_attribute(world, obj, name)
    elif type(obj) is super:
        return super_attribute(world, obj, name)
    else:
        return world.leaf_getattr(obj, name)
    if value is not MISSING:
        return value
    return _fallback(world, obj, cls, name, None)


def _fallback(world: World, obj: object, cls: type, name: str, error: AttributeError | None) -> object:
    hook = world.class_get(cls, "__getattr__")
    if hook is not None:
        return world.call(bind(world, hook[0], obj, cls), (name,), {})
    raise error or missing_attribute(obj, name)


def missing_attribute(obj: object, name: str, kind: type | None = None) -> AttributeError:
    """The error of an object that lacks a name. kind: its class as the program knows it, where that is another."""
    if isinstance(obj, type):
        message = f"type object '{obj.__name__}' has no attribute '{name}'"
    elif isinstance(obj, types.ModuleType):
        message = f"module '{obj.__dict__.get('__name__', '?')}' has no attribute '{name}'"
    else:
        message = f"'{(kind or type(obj)).__name__}' object has no attribute '{name}'"
    return AttributeError(message, name=name, obj=obj)


def instance_attribute(world: World, obj: object, name: str) -> object:
    """`object.__getattribute__(obj, name)`, or MISSING. A property that raises AttributeError raises it."""
    cls = type(obj)
    found = world.class_get(cls, name)
    if found is None:
        return world.instance_get(obj, name)
    descriptor = found[0]
    kind = type(descriptor)
    if kind is not _Function and is_data_descriptor(kind):
        return bind_or_hook(world, descriptor, obj, cls, name)
    value = world.instance_get(obj, name)
    if value is not MISSING:
        return value
    return bind_or_hook(world, descriptor, obj, cls, name)


def bind_or_hook(world: World, descriptor: object, obj: object, cls: type, name: str) -> object:
    """Bind; an AttributeError raised on the way is the same as finding nothing when there is a `__getattr__`."""
    if type(descriptor) is _Function:
        return types.MethodType(descriptor, obj)
    try:
        return bind(world, descriptor, obj, cls)
    except AttributeError as error:
        if world.class_get(cls, "__getattr__") is None:
            raise
        return _fallback(world, obj, cls, name, error)


def is_data_descriptor(kind: type) -> bool:
    """Whether a descriptor of this class comes before the instance's own dict."""
    return hasattr(kind, "__set__") or hasattr(kind, "__delete__")


def bind(world: World, descriptor: Any, obj: object, cls: type) -> object:
    """`descriptor.__get__(obj, cls)`; `obj` is None when the attribute is read from the class."""
    kind = type(descriptor)
    if kind is _Function:
        return descriptor if obj is None else types.MethodType(descriptor, obj)
    if kind is property:
        if obj is None:
            return descriptor
        if descriptor.fget is None:
            return world.descriptor_get(descriptor, obj, cls)
        return world.call(descriptor.fget, (obj,), {})
    if kind is staticmethod:
        return descriptor.__func__
    if kind is classmethod and is_python(descriptor.__func__):
        return types.MethodType(descriptor.__func__, cls)
    getter = getattr(kind, "__get__", None)
    if getter is None:
        return descriptor
    if is_python(getter):
        return world.call(getter, (descriptor, obj, cls), {})
    return world.descriptor_get(descriptor, obj, cls)


def type_attribute(world: World, cls: type, name: str) -> object:
    """`type.__getattribute__(cls, name)`, or MISSING."""
    meta = type(cls)
    on_meta = world.class_get(meta, name)
    if on_meta is not None and is_data_descriptor(type(on_meta[0])):
        return bind_or_hook(world, on_meta[0], cls, meta, name)
    found = world.class_get(cls, name)
    if found is not None:
        return bind(world, found[0], None, cls)
    if on_meta is not None:
        return bind_or_hook(world, on_meta[0], cls, meta, name)
    return MISSING


def module_attribute(world: World, module: object, name: str) -> object:
    """An attribute of a module: its own, its class's, or what its `__getattr__` gives."""
    cls = type(module)
    if may_change(cls):  # a class of the program's, which may have properties
        value = instance_attribute(world, module, name)
    else:
        value = world.instance_get(module, name)
    if value is not MISSING:
        return value
    if not may_change(cls) and world.class_get(cls, name) is not None:
        return world.leaf_getattr(module, name)
    hook = world.instance_get(module, "__getattr__")
    if hook is not MISSING:
        return world.call(hook, (name,), {})
    return world.leaf_getattr(module, name)  # raises, with the words of this version of Python


def super_attribute(world: World, proxy: Any, name: str) -> object:
    """Lookup behind `super(cls, obj)`: the classes after `cls` in the order of `obj`'s."""
    this, obj, start = proxy.__thisclass__, proxy.__self__, proxy.__self_class__
    if obj is None or name == "__class__":
        return world.leaf_getattr(proxy, name)
    mro = start.__mro__
    for cls in mro[mro.index(this) + 1 :]:
        found = world.class_get(cls, name)  # the world is asked of each class: one may have the name by now, or later
        if found is not None and found[1] is cls:
            return bind(world, found[0], None if obj is start else obj, start)
    return world.leaf_getattr(proxy, name)


def store_attribute(world: World, obj: object, name: str, value: object) -> None:
    """`obj.name = value`."""
    cls = type(obj)
    setter = cls.__setattr__
    if is_python(setter):
        world.call(setter, (obj, name, value), {})
    elif setter is _object_setattr and may_change(cls):
        store_instance_attribute(world, obj, name, value)
    elif setter is _type_setattr and isinstance(obj, type) and may_change(obj):
        store_class_attribute(world, obj, name, value)
    elif isinstance(obj, types.ModuleType):
        world.instance_set(obj, name, value)
    else:
        world.leaf_setattr(obj, name, value)


def store_instance_attribute(world: World, obj: object, name: str, value: object) -> None:
    """`object.__setattr__(obj, name, value)`."""
    found = world.class_get(type(obj), name)
    if found is not None and hasattr(type(found[0]), "__set__"):
        set_through(world, found[0], obj, value)
    else:
        world.instance_set(obj, name, value)


def store_class_attribute(world: World, cls: type, name: str, value: object) -> None:
    """`type.__setattr__(cls, name, value)`."""
    descriptor = world.class_get(type(cls), name)
    if descriptor is not None and hasattr(type(descriptor[0]), "__set__"):
        set_through(world, descriptor[0], cls, value)
    else:
        world.class_set(cls, name, value)


def set_through(world: World, descriptor: Any, obj: object, value: object) -> None:
    """Sets an attribute by its data descriptor."""
    kind = type(descriptor)
    if kind is property and descriptor.fset is not None:
        world.call(descriptor.fset, (obj, value), {})
    elif is_python(kind.__set__):
        world.call(kind.__set__, (descriptor, obj, value), {})
    else:
        world.descriptor_set(descriptor, obj, value)


def delete_attribute(world: World, obj: object, name: str) -> None:
    """`del obj.name`."""
    cls = type(obj)
    deleter = cls.__delattr__
    if is_python(deleter):
        world.call(deleter, (obj, name), {})
    elif deleter is _object_delattr and may_change(cls):
        delete_instance_attribute(world, obj, name)
    elif deleter is _type_delattr and isinstance(obj, type) and may_change(obj):
        world.class_del(obj, name)
    elif isinstance(obj, types.ModuleType):
        world.instance_del(obj, name)
    else:
        world.leaf_delattr(obj, name)


def delete_instance_attribute(world: World, obj: object, name: str) -> None:
    """`object.__delattr__(obj, name)`."""
    found = world.class_get(type(obj), name)
    if found is None or not hasattr(type(found[0]), "__delete__"):
        world.instance_del(obj, name)
    else:
        delete_through(world, found[0], obj)


def delete_through(world: World, descriptor: Any, obj: object) -> None:
    """Deletes an attribute by its data descriptor."""
    kind = type(descriptor)
    if kind is property and descriptor.fdel is not None:
        world.call(descriptor.fdel, (obj,), {})
    elif is_python(kind.__delete__):
        world.call(kind.__delete__, (descriptor, obj), {})
    else:
        world.descriptor_del(descriptor, obj)


def special_method(world: World, obj: object, name: str) -> object:
    """A method that syntax looks up on the type, bound to `obj`; MISSING."""
    cls = type(obj)
    found = world.class_get(cls, name)
    return MISSING if found is None else bind(world, found[0], obj, cls)


def python_method(cls: type, name: str) -> object:
    """The function behind a special method if it is interpreted code, else None. Costs one cached lookup."""
    method = getattr(cls, name, None)
    return method if type(method) is _Function else None
