"""The world as it is: every operation does what CPython does, on real objects.

It is the oracle of the interpreter's tests and the base of the capturing world, which overrides the storage
primitives (`load_global`, `instance_get`, ...), the policy of C calls (`call_leaf`) and operators on tensors.
"""

from __future__ import annotations

import builtins
import collections
import operator
import types
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from torchdynamo.interpreter import attributes, operators
from torchdynamo.interpreter.attributes import is_python, python_method
from torchdynamo.interpreter.builtins_conversions import number_of
from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.iterators import GetitemIterator, LocalIterator, local_iterator
from torchdynamo.interpreter.protocol import (
    MISSING,
    Args,
    InterpreterApi,
    InterpreterObject,
    Kwargs,
    UnsupportedProgram,
    World,
    is_text,
)
from torchdynamo.interpreter.structural import shows_parts, stored_key

_object_format: object = object.__format__


class PlainWorld(World):
    """The world as it is: what the program touches is touched."""

    interpreter: InterpreterApi

    watches_tests = False

    def at_test(self, frame: Any, value: object) -> None:
        """Nothing depends on where a truth is asked for."""

    # -- names ------------------------------------------------------------------------------

    def load_global(self, fn: types.FunctionType, name: str) -> object:
        value = fn.__globals__.get(name, MISSING)
        if value is MISSING:
            value = getattr(fn, "__builtins__", builtins.__dict__).get(name, MISSING)
            if value is MISSING:
                raise NameError(f"name '{name}' is not defined", name=name)
        return value

    def store_global(self, fn: types.FunctionType, name: str, value: object) -> None:
        fn.__globals__[name] = value

    def delete_global(self, fn: types.FunctionType, name: str) -> None:
        if name not in fn.__globals__:
            raise NameError(f"name '{name}' is not defined", name=name)
        del fn.__globals__[name]

    def make_cell(self, cell: types.CellType) -> types.CellType:
        return cell

    def load_cell(self, cell: types.CellType) -> object:
        try:
            return cell.cell_contents
        except ValueError:
            return MISSING

    def store_cell(self, cell: types.CellType, value: object) -> None:
        cell.cell_contents = value

    def delete_cell(self, cell: types.CellType) -> None:
        del cell.cell_contents

    def function_defaults(self, fn: types.FunctionType) -> tuple[tuple[object, ...] | None, dict[str, object] | None]:
        return fn.__defaults__, fn.__kwdefaults__

    # -- attributes -------------------------------------------------------------------------

    def getattr(self, obj: object, name: str) -> object:
        return attributes.load_attribute(self, obj, name)

    def setattr(self, obj: object, name: str, value: object) -> None:
        attributes.store_attribute(self, obj, name, value)

    def delattr(self, obj: object, name: str) -> None:
        attributes.delete_attribute(self, obj, name)

    def class_of(self, obj: object) -> type:
        return type(obj)

    def make_super(self, cls: object, obj: object) -> object:
        return super(cls, obj)

    def instance_get(self, obj: object, name: str) -> object:
        try:
            storage = object.__getattribute__(obj, "__dict__")
        except AttributeError:
            return MISSING
        return storage.get(name, MISSING)

    def instance_set(self, obj: object, name: str, value: object) -> None:
        if isinstance(obj, types.ModuleType):
            types.ModuleType.__setattr__(obj, name, value)
        else:
            object.__setattr__(obj, name, value)

    def instance_del(self, obj: object, name: str) -> None:
        if isinstance(obj, types.ModuleType):
            types.ModuleType.__delattr__(obj, name)
        else:
            object.__delattr__(obj, name)

    def class_get(self, cls: type, name: str) -> tuple[object, type] | None:
        for base in cls.__mro__:
            storage = base.__dict__
            if name in storage:
                return storage[name], base
        return None

    def class_set(self, cls: type, name: str, value: object) -> None:
        type.__setattr__(cls, name, value)

    def class_del(self, cls: type, name: str) -> None:
        type.__delattr__(cls, name)

    def leaf_getattr(self, obj: object, name: str) -> object:
        return getattr(obj, name)

    def leaf_setattr(self, obj: object, name: str, value: object) -> None:
        setattr(obj, name, value)

    def leaf_delattr(self, obj: object, name: str) -> None:
        delattr(obj, name)

    def descriptor_get(self, descriptor: Any, obj: object, cls: type) -> object:
        return type(descriptor).__get__(descriptor, obj, cls)

    def descriptor_set(self, descriptor: Any, obj: object, value: object) -> None:
        type(descriptor).__set__(descriptor, obj, value)

    def descriptor_del(self, descriptor: Any, obj: object) -> None:
        type(descriptor).__delete__(descriptor, obj)

    # -- items ------------------------------------------------------------------------------

    def getitem(self, obj: Any, key: object) -> object:
        kind = type(obj)
        if may_change(kind):
            method = getattr(kind, "__getitem__", None)
            if is_python(method):
                return self.call(method, (obj, key), {})
            if isinstance(obj, dict) and method is dict.__getitem__:
                key = stored_key(self, obj, key)
                missing = python_method(kind, "__missing__") if key not in obj else None
                if missing is not None:
                    return self.call(missing, (obj, key), {})
        elif isinstance(obj, dict):
            key = stored_key(self, obj, key)
        if isinstance(obj, collections.defaultdict) and is_python(obj.default_factory) and key not in obj:
            value = obj[key] = self.call(obj.default_factory, (), {})
            return value
        if isinstance(obj, type):
            return self._class_getitem(obj, key)
        return obj[key if isinstance(obj, dict) else self._place(key)]

    def _place(self, key: object) -> Any:
        """A key of a sequence, with the numbers that methods in Python tell."""
        if type(key) is slice:
            return slice(*map(self._place, (key.start, key.stop, key.step)))
        return number_of(self, key, operator.index, "__index__")

    def _class_getitem(self, cls: type, key: object) -> object:
        found = self.class_get(cls, "__class_getitem__")
        if found is None or not isinstance(found[0], classmethod) or not is_python(found[0].__func__):
            return cls[key]  # type: ignore[index]
        return self.call(found[0].__func__, (cls, key), {})

    def setitem(self, obj: Any, key: object, value: object) -> None:
        method = python_method(type(obj), "__setitem__")
        if method is not None:
            self.call(method, (obj, key, value), {})
        else:
            obj[stored_key(self, obj, key) if isinstance(obj, dict) else self._place(key)] = value

    def delitem(self, obj: Any, key: object) -> None:
        method = python_method(type(obj), "__delitem__")
        if method is not None:
            self.call(method, (obj, key), {})
        else:
            del obj[stored_key(self, obj, key) if isinstance(obj, dict) else key]

    # -- operators --------------------------------------------------------------------------

    def truth(self, obj: object) -> bool:
        return operators.truth(self, obj)

    def check(self, obj: object, expected: bool) -> bool:
        return self.truth(obj)

    def unary(self, op: str, a: object) -> object:
        return operators.unary(self, op, a)

    def binary(self, op: str, a: object, b: object) -> object:
        return operators.binary(self, op, a, b)

    def inplace(self, op: str, a: object, b: object) -> object:
        return operators.inplace(self, op, a, b)

    def compare(self, op: str, a: object, b: object) -> object:
        return operators.compare(self, op, a, b)

    def choose(
        self, op: str, values: tuple[object, object], keys: tuple[object, object]
    ) -> tuple[object, object] | None:
        return None

    def order(self, values: list[object], keys: list[object], reverse: bool) -> list[object] | None:
        return None

    def is_same(self, a: object, b: object) -> bool:
        return a is b

    def contains(self, container: object, item: object) -> bool:
        return operators.contains(self, container, item)

    def tell_apart(self, *values: object) -> None:
        """What is not hashed or compared by a method of its own is so by its identity."""

    # -- iteration --------------------------------------------------------------------------

    def iterate(self, obj: Any) -> object:
        local = local_iterator(obj)
        if local is not None:
            return local
        kind = type(obj)
        if isinstance(obj, InterpreterObject) or not may_change(kind):
            return iter(obj)
        method = getattr(kind, "__iter__", None)
        if is_python(method):
            iterator = self.call(method, (obj,), {})
            if not hasattr(type(iterator), "__next__"):
                raise TypeError(f"iter() returned non-iterator of type '{type(iterator).__name__}'")
            return iterator
        if method is None and not hasattr(kind, "__iter__") and python_method(kind, "__getitem__") is not None:
            return GetitemIterator(self, obj)
        return iter(obj)

    def advance(self, iterator: Any) -> object:
        if isinstance(iterator, LocalIterator):
            return iterator.__next__()
        method = type(iterator).__next__
        if is_python(method) and not isinstance(iterator, InterpreterObject):
            return self.call(method, (iterator,), {})
        return next(iterator)

    # -- text -------------------------------------------------------------------------------

    def convert(self, value: object, how: str) -> str:
        if how == "ascii":
            return self.convert(value, "repr").encode("ascii", "backslashreplace").decode("ascii")
        text = self.call(str if how == "str" else repr, (value,), {})
        assert is_text(text)
        return cast(str, text)

    def note_raise(self, error: BaseException) -> None:
        """Every exception is the program's."""

    def let_go(self, values: Sequence[object], error: BaseException | None) -> None:
        """Whatever ends with its last reference does so by itself."""

    def format_value(self, value: object, spec: str) -> str:
        kind = type(value)
        if may_change(kind) and not isinstance(value, InterpreterObject):
            method = python_method(kind, "__format__")
            if method is not None:
                text = self.call(method, (value, spec), {})
                if not is_text(text):
                    raise TypeError(f"__format__ must return a str, not {type(text).__name__}")
                return cast(str, text)
            if kind.__format__ is _object_format and not spec:
                return self.convert(value, "str")
        if not spec and shows_parts(value):
            return self.convert(value, "str")
        return format(value, spec)

    def join_texts(self, parts: Any) -> str:
        return "".join(parts)

    # -- calls ------------------------------------------------------------------------------

    def call(self, fn: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return self.interpreter.call(fn, args, kwargs)

    def call_leaf(self, fn: Any, args: Args, kwargs: Kwargs) -> object:
        return fn(*args, **kwargs)

    def build_class(
        self, body: types.FunctionType, name: str, bases: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        resolved = types.resolve_bases(bases)
        meta, namespace, kwargs = types.prepare_class(name, resolved, kwargs)
        if resolved is not bases:
            namespace["__orig_bases__"] = bases
        cell = self.interpreter.run_class_body(body, namespace)
        cls = self.call(meta, (name, resolved, namespace), kwargs)
        if isinstance(cell, types.CellType) and isinstance(cls, type) and self.load_cell(cell) is not cls:
            state = "not set" if self.load_cell(cell) is MISSING else "set to a different class"
            raise (RuntimeError if state == "not set" else TypeError)(f"__class__ {state} defining {name!r} as {cls!r}")
        return cls

    def import_name(self, fn: types.FunctionType, name: str, fromlist: Any, level: int) -> object:
        return builtins.__import__(name, fn.__globals__, None, fromlist, level)

    def unsupported(self, reason: str, detail: str) -> NoReturn:
        raise UnsupportedProgram(reason, detail)
