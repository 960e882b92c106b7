"""What an object is by its content: the same in each process that has the same program, and in no other.

Guards compare functions, classes and modules by their identity, which means nothing elsewhere. Their content is made of
names, of code and of constants; `content_of` gives it as nested tuples of texts and numbers, `digest_of` as a hash.
What has none is refused with a reason: two objects with one content are taken for the same object.
"""

from __future__ import annotations

import enum
import hashlib
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket

from torchdynamo.graph import numpy_values
from torchdynamo.outside.externals import CONSTANT_TYPES

Content: TypeAlias = tuple[object, ...]

# Why an object has no content, by the id in `NoContent.reason`.
REASONS: Mapping[str, str] = {
    "state": "an object whose state is not made of constants",
    "not_loaded": "a module that is not loaded under its own name",
    "bound": "a C method that is bound to an object",
    "own_operator": "an operator that is not torch's own",
    "time_zone": "a time in a zone of the program's own",
}


class NoContent(Exception):
    """An object that cannot be told from others in another process; `reason` is of `REASONS`."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(f"{what} is {REASONS[reason]}")
        self.reason = reason


def digest_of(value: object) -> str:
    """A hash of `content_of(value)`, 32 hexadecimal digits. Raises NoContent."""
    return hashlib.sha256(repr(content_of(value)).encode()).hexdigest()[:32]


class Digests:
    """Digests of many objects of one moment: each class and function is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str]] = {}

    def of(self, value: object) -> str:
        """`digest_of(value)`. Raises NoContent."""
        if not isinstance(value, (type, types.FunctionType)):
            return digest_of(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, digest_of(value)
        return self._known[id(value)][1]


def content_of(value: object) -> Content:
    """What an object is, wherever it lies. Raises NoContent."""
    return _Reader().read(value)


def content_of_code(code: types.CodeType) -> Content:
    """What a function's code does, wherever it stands: no file, no lines."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_name, code.co_code, code.co_exceptiontable, names, counts, tuple(map(_of_code, code.co_consts))


def _of_code(constant: object) -> object:
    """A constant of a function's code."""
    if isinstance(constant, types.CodeType):
        return content_of_code(constant)
    if isinstance(constant, tuple):
        return tuple(map(_of_code, constant))
    if isinstance(constant, frozenset):
        return "frozenset", sorted(map(repr, map(_of_code, constant)))
    return type(constant).__name__, repr(constant)


class _Reader:
    """Reads one object. Functions lead to others by their cells, and may lead back."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # of functions that are being read, or were: by identity, in that order

    def read(self, value: Any) -> Content:
        kind = type(value)
        rule = _BY_TYPE.get(kind)
        if rule is not None:
            return rule(self, value)
        if isinstance(value, enum.Enum):
            return "member", self.read(kind), value.name, self.read(value.value)
        if isinstance(value, type):
            return self._class(value)
        if kind in CONSTANT_TYPES or numpy_values.is_scalar(value):
            return self._constant(value)
        raise NoContent("state", f"a {kind.__module__}.{kind.__qualname__}")

    def _constant(self, value: Any) -> Content:
        zone = getattr(value, "tzinfo", None)
        if zone is not None and type(zone).__module__ != "datetime":
            raise NoContent("time_zone", repr(value))
        return type(value).__module__, type(value).__qualname__, repr(value)

    def _float(self, value: float) -> Content:
        return "float", "nan" if math.isnan(value) else value.hex()

    def _complex(self, value: complex) -> Content:
        return "complex", self._float(value.real), self._float(value.imag)

    def _pattern(self, value: re.Pattern[Any]) -> Content:
        return "pattern", repr(value.pattern), value.flags

    def _numbers(self, value: torch.finfo | torch.iinfo) -> Content:
        return type(value).__name__, str(value.dtype)

    def _tuple(self, value: tuple[object, ...]) -> Content:
        return type(value).__name__, *map(self.read, value)

    def _set(self, value: frozenset[object]) -> Content:
        return "frozenset", *sorted(map(repr, map(self.read, value)))

    def _module(self, value: types.ModuleType) -> Content:
        if sys.modules.get(value.__name__) is not value:
            raise NoContent("not_loaded", f"the module {value.__name__}")
        return "module", value.__name__

    def _namespace(self, value: dict[str, object]) -> Content:
        """The globals of a module; what is read of them is guarded on its own. No other dict has content."""
        name = value.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        if type(module) is not types.ModuleType or vars(module) is not value:
            raise NoContent("state", "a dict")
        return "namespace", name

    def _class(self, value: type) -> Content:
        """By its name and those that it inherits from: what is read of it is guarded on its own."""
        names = tuple((kind.__module__, kind.__qualname__) for kind in value.__mro__)
        return "class", type(value).__module__, type(value).__qualname__, names

    def _function(self, value: types.FunctionType) -> Content:
        place = self._places.get(id(value))
        if place is not None:
            return "function", place
        self._places[id(value)] = len(self._places)
        names = value.__module__, value.__qualname__, value.__name__
        keywords, attributes = value.__kwdefaults__ or {}, value.__dict__
        parts = (*(value.__defaults__ or ()), *keywords.values(), *attributes.values())
        held = (len(value.__defaults__ or ()), tuple(keywords), tuple(attributes), *map(self._held, parts))
        cells = tuple(map(self._cell, value.__closure__ or ()))
        return "function", names, content_of_code(value.__code__), held, cells

    def _held(self, value: object) -> Content:
        """What a function holds. An object without content stands there by its class: what is read of it is guarded."""
        try:
            return self.read(value)
        except NoContent:
            return "object of", self._class(type(value))

    def _cell(self, value: types.CellType) -> Content:
        try:
            return "cell", self._held(value.cell_contents)
        except ValueError:
            return "empty cell", ()

    def _code(self, value: types.CodeType) -> Content:
        return "code", value.co_qualname, content_of_code(value)

    def _builtin(self, value: types.BuiltinFunctionType) -> Content:
        owner = value.__self__
        if owner is not None and not isinstance(owner, (types.ModuleType, type)):
            held = getattr(sys.modules.get(str(value.__module__)), value.__name__, None)
            if held is not value:  # torch's functions keep a record of their module that is no module
                raise NoContent("bound", repr(value))
        within = self._class(owner) if isinstance(owner, type) else ()
        return "builtin", value.__module__, value.__qualname__, within

    def _member(self, value: Any) -> Content:
        return type(value).__name__, self._class(value.__objclass__), value.__name__

    def _property(self, value: property) -> Content:
        return "property", *map(self.read, (value.fget, value.fset, value.fdel))

    def _method(self, value: Any) -> Content:
        return type(value).__name__, self.read(value.__func__)

    def _reduced(self, value: Any) -> Content:
        reduced: Any = value.__reduce__()
        return type(value).__name__, self.read(reduced[1]), *map(self.read, map(_items, reduced[2:]))

    def _alias(self, value: Any) -> Content:
        return type(value).__name__, self.read(typing.get_origin(value)), self.read(typing.get_args(value))

    def _operator(self, value: OpOverload | OpOverloadPacket) -> Content:
        name = str(value)
        if name.partition(".")[0] not in _TORCHS_OPERATORS:
            raise NoContent("own_operator", name)
        return type(value).__name__, name


def _items(table: object) -> object:
    """A dict as a tuple of pairs, in its order."""
    return tuple(table.items()) if isinstance(table, dict) else table


_TORCHS_OPERATORS = frozenset({"aten", "prims"})
_BY_TYPE: dict[type, Callable[[_Reader, Any], Content]] = {
    float: _Reader._float,
    complex: _Reader._complex,
    re.Pattern: _Reader._pattern,
    torch.finfo: _Reader._numbers,
    torch.iinfo: _Reader._numbers,
    tuple: _Reader._tuple,
    torch.Size: _Reader._tuple,
    frozenset: _Reader._set,
    dict: _Reader._namespace,
    types.ModuleType: _Reader._module,
    types.FunctionType: _Reader._function,
    types.CodeType: _Reader._code,
    types.BuiltinFunctionType: _Reader._builtin,
    property: _Reader._property,
    staticmethod: _Reader._method,
    classmethod: _Reader._method,
    operator.itemgetter: _Reader._reduced,
    operator.attrgetter: _Reader._reduced,
    operator.methodcaller: _Reader._reduced,
    types.GenericAlias: _Reader._alias,
    types.UnionType: _Reader._alias,
    OpOverload: _Reader._operator,
    OpOverloadPacket: _Reader._operator,
    **dict.fromkeys(
        (
            types.WrapperDescriptorType,
            types.MethodDescriptorType,
            types.ClassMethodDescriptorType,
            types.GetSetDescriptorType,
            types.MemberDescriptorType,
        ),
        _Reader._member,
    ),
}
