"""`getattr` and its kin, `super()`, and the attribute methods of `object` and `type`."""

from __future__ import annotations

import types

from torchdynamo.interpreter import attributes
from torchdynamo.interpreter.builtin_rules import Rules
from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.protocol import MISSING, Args, InterpreterObject, Kwargs, World

RULES = Rules()


@RULES.interprets(getattr)
def call_getattr(world: World, args: Args, kwargs: Kwargs) -> object:
    if not 2 <= len(args) <= 3 or kwargs or not isinstance(args[1], str):
        return getattr(*args, **kwargs)
    if len(args) == 2:
        return world.getattr(args[0], args[1])
    try:
        return world.getattr(args[0], args[1])
    except AttributeError:
        world.interpreter.propagating = None
        return args[2]


@RULES.interprets(hasattr)
def call_hasattr(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 2 or kwargs or not isinstance(args[1], str):
        return hasattr(*args, **kwargs)
    try:
        world.getattr(args[0], args[1])
    except AttributeError:
        world.interpreter.propagating = None
        return False
    return True


@RULES.interprets(setattr)
def call_setattr(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 3 or kwargs or not isinstance(args[1], str):
        setattr(*args, **kwargs)  # raises
    else:
        world.setattr(*args)
    return None


@RULES.interprets(delattr)
def call_delattr(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 2 or kwargs or not isinstance(args[1], str):
        delattr(*args, **kwargs)  # raises
    else:
        world.delattr(*args)
    return None


@RULES.interprets(object.__getattribute__)
def call_object_getattribute(world: World, args: Args, kwargs: Kwargs) -> object:
    obj, name = args
    if isinstance(obj, (type, InterpreterObject)) or not may_change(type(obj)):
        return world.call_leaf(object.__getattribute__, args, kwargs)
    value = attributes.instance_attribute(world, obj, name)
    if value is MISSING:
        raise attributes.missing_attribute(obj, name)
    return value


@RULES.interprets(type.__getattribute__)
def call_type_getattribute(world: World, args: Args, kwargs: Kwargs) -> object:
    value = attributes.type_attribute(world, *args)
    if value is MISSING:
        raise attributes.missing_attribute(*args)
    return value


@RULES.interprets(object.__setattr__)
def call_object_setattr(world: World, args: Args, kwargs: Kwargs) -> object:
    if isinstance(args[0], type) or not may_change(type(args[0])):
        return world.call_leaf(object.__setattr__, args, kwargs)
    attributes.store_instance_attribute(world, *args)
    return None


@RULES.interprets(object.__delattr__)
def call_object_delattr(world: World, args: Args, kwargs: Kwargs) -> object:
    attributes.delete_instance_attribute(world, *args)
    return None


@RULES.interprets(type.__setattr__)
def call_type_setattr(world: World, args: Args, kwargs: Kwargs) -> object:
    """As a metaclass's own `__setattr__` ends in it."""
    if len(args) != 3 or kwargs or not isinstance(args[0], type) or not may_change(args[0]):
        return world.call_leaf(type.__setattr__, args, kwargs)
    attributes.store_class_attribute(world, *args)
    return None


@RULES.interprets(type.__delattr__)
def call_type_delattr(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) != 2 or kwargs or not isinstance(args[0], type) or not may_change(args[0]):
        return world.call_leaf(type.__delattr__, args, kwargs)
    world.class_del(*args)
    return None


@RULES.interprets(property.__get__, types.MemberDescriptorType.__get__)
def call_descriptor_get(world: World, args: Args, kwargs: Kwargs) -> object:
    descriptor, obj, *kind = args
    return attributes.bind(world, descriptor, obj, *(kind or [type(obj)]))


@RULES.interprets(property.__set__, types.MemberDescriptorType.__set__)
def call_descriptor_set(world: World, args: Args, kwargs: Kwargs) -> object:
    """As a class calls the setter of one that it inherits from: `Base.size.__set__(self, size)`."""
    attributes.set_through(world, *args)
    return None


@RULES.interprets(property.__delete__, types.MemberDescriptorType.__delete__)
def call_descriptor_delete(world: World, args: Args, kwargs: Kwargs) -> object:
    attributes.delete_through(world, *args)
    return None


@RULES.interprets(super)
def call_super(world: World, args: Args, kwargs: Kwargs) -> object:
    if len(args) == 2 and not kwargs:
        return world.make_super(*args)
    if args or kwargs:
        return super(*args, **kwargs)
    frame = world.interpreter.frames[-1]
    code = frame.function.__code__
    if not code.co_argcount:
        raise RuntimeError("super(): no arguments")
    first = frame.fast[0]
    if isinstance(first, types.CellType):
        first = world.load_cell(first)
    if "__class__" not in code.co_freevars:
        raise RuntimeError("super(): __class__ cell not found")
    cell = frame.fast[frame.decoded.local_names.index("__class__", len(frame.fast) - len(code.co_freevars))]
    cls = world.load_cell(cell)
    if cls is MISSING:
        raise RuntimeError("super(): empty __class__ cell")
    return world.make_super(cls, first)
