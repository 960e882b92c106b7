"""What an object is, by content: whether that of another process is the same to capture.

In one process guards compare functions and classes by identity, and capture takes for fixed whatever an identity fixes:
the code of a function, the names and kinds of all that is in a class. Here that is what a digest is made of. What may
change while the object is the same (attributes, contents of cells, globals) guards read at each call.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import marshal
import operator
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchdynamo.graph import numpy_values
from torchdynamo.interpreter.classes import may_change
from torchdynamo.marks import mark_of
from torchdynamo.outside.externals import CONSTANT_TYPES


class NotKept(Exception):
    """Something of a frame has no form that means the same in another process."""


class Contents:
    """Digests of objects, each computed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str]] = {}
        self._classes: dict[type, str] = {}

    def of(self, obj: object) -> str:
        """The digest of an object; "" for one that says nothing of its own, or has contents that guards read.

        Raises:
            NotKept: capture may know more of it than can be told.
        """
        known = self._known.get(id(obj))
        if known is None:
            told = self._whole(obj)
            known = self._known[id(obj)] = obj, "" if told == () else _hash(_bytes(told))
        return known[1]

    def _whole(self, obj: object) -> object:
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, types.CellType):
            return ()
        if type(obj) is dict and "__name__" in obj:
            return "globals", obj["__name__"]
        found = self._part(obj, 0)
        if found == (_name(type(obj)),):
            raise NotKept(f"a {_name(type(obj))} is held by its identity")
        return found

    # -- functions --------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, depth: int) -> object:
        mark = mark_of(function)
        name = function.__module__, function.__qualname__, function.__globals__.get("__name__")
        if depth > _DEEPEST:
            return name
        defaults = (function.__defaults__, function.__kwdefaults__)
        cells = tuple(self._cell(cell, depth) for cell in function.__closure__ or ())
        told = mark.kind.value if mark is not None else None
        own = sorted(map(str, function.__dict__))
        given = self._part(defaults, depth + 1) if any(defaults) else None
        return name, function.__code__, given, cells, own, told

    def _cell(self, cell: types.CellType, depth: int) -> object:
        """Functions that a decorator holds say what it does; guards read all else."""
        if cell == _EMPTY:
            return ()
        held = cell.cell_contents
        return self._part(held, depth + 1) if isinstance(held, types.FunctionType) else _name(type(held))

    # -- classes ----------------------------------------------------------------------------

    def _class(self, kind: type) -> object:
        """All that is in the class, in those that it inherits from, and in its own class, which `isinstance` asks
        without a guard. Of torch's and of C the names say it: what is looked up in torch's, guards compare."""
        meta: type = type(kind)
        return tuple(self._own_part(klass) for klass in (*kind.__mro__, *meta.__mro__[:-2]))

    def _own_part(self, kind: type) -> str:
        """A digest: many classes inherit from one."""
        found = self._classes.get(kind)
        if found is None:
            told: tuple[object, ...] = (_name(kind), _name(type(kind)), kind.__flags__ & _LASTING_FLAGS)
            if may_change(kind) and str(kind.__module__).partition(".")[0] != "torch":
                table = _CLASS_DICT(kind)
                told = (*told, *((key, self._member(table[key])) for key in table if key not in _VOLATILE))
            found = self._classes[kind] = _hash(_bytes(told))
        return found

    def _member(self, value: object) -> object:
        """What is in a class's body; of data the kind alone, since guards compare what the program reads."""
        if isinstance(value, (types.FunctionType, *_HOLDERS)):
            return self._part(value, 1)
        return _name(type(value))

    # -- values -----------------------------------------------------------------------------

    def _part(self, value: Any, depth: int) -> object:
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value, depth)
        if kind is types.CodeType:
            return value
        if kind in _PLAIN:
            return kind.__name__, repr(value)
        if isinstance(value, type):
            return "class", _name(value)
        if kind in CONSTANT_TYPES:  # that guards read with what holds them
            return self._constant(value)
        if depth > _DEEPEST:
            return (_name(kind),)
        if kind is tuple or kind is list:
            return kind.__name__, tuple(self._part(item, depth + 1) for item in value)
        if kind is set or kind is frozenset:
            return kind.__name__, sorted(_bytes(self._part(item, depth + 1)) for item in value)
        if kind is dict:
            return "dict", tuple((self._part(k, depth + 1), self._part(v, depth + 1)) for k, v in value.items())
        if kind in _HOLDERS:
            parts = tuple(self._held(getattr(value, name, None), depth + 1) for name in _HOLDERS[kind])
            return _name(kind), parts
        if kind in _GETTERS:
            return _name(kind), repr([self._constant(part) for part in value.__reduce__()[1]])
        if kind in _C_FUNCTIONS:
            owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
            owned = _name(owner) if isinstance(owner, type) else getattr(owner, "__name__", None)
            module = getattr(value, "__module__", None)
            package = sys.modules.get(module.partition(".")[0]) if type(module) is str else None
            return _name(kind), module, value.__name__, owned, str(getattr(package, "__version__", ""))
        if kind is functools._lru_cache_wrapper:
            return _name(kind), repr(value.cache_parameters()), self._part(value.__wrapped__, depth + 1)
        if isinstance(value, enum.Enum):
            return _name(kind), value.name, self._part(value.value, depth + 1)
        if isinstance(value, types.ModuleType):  # properties of its class come before what is in it
            return "module", value.__name__, kind is types.ModuleType or self._class(kind)
        if isinstance(value, _TOLD_BY_TEXT):
            text = repr(value)
            return (_name(kind), text) if " at 0x" not in text else (_name(kind),)
        return (_name(kind),)

    def _held(self, value: object, depth: int) -> object:
        """What a descriptor calls, which is read without a guard."""
        of_c = isinstance(value, type) and not may_change(value)
        if value is None or of_c or isinstance(value, (types.FunctionType, *_C_FUNCTIONS)):
            return self._part(value, depth)
        raise NotKept(f"a descriptor calls a {_name(type(value))}")

    def _constant(self, value: Any) -> object:
        """An immutable value, by all that it says."""
        kind = type(value)
        if kind in _PLAIN:
            return kind.__name__, repr(value)
        if kind in numpy_values.SCALARS and not value.dtype.hasobject:
            return _name(kind), repr(value.dtype), value.tobytes()
        told = _CONSTANTS.get(kind)
        if told is None:
            raise NotKept(f"a {_name(kind)} has no form")
        return _name(kind), repr(told(value))


def code_digest(code: types.CodeType) -> str:
    """All of a function's code, its file and lines included: what is kept tells of them."""
    return _hash(_bytes(code))


def _bytes(told: Any) -> bytes:
    """What is told of an object: plain values, tuples and lists of them, code.

    Raises:
        NotKept: a class's own text, say, stands where a text is expected.
    """
    try:  # version 2 writes the same for the same code: later ones tell how often an object is referred to
        return marshal.dumps(told, 2)
    except ValueError as error:
        raise NotKept(str(error)) from None


def nested_codes(code: types.CodeType) -> Iterable[tuple[tuple[int, ...], types.CodeType]]:
    """(places among the constants, code) of a code object and of those within it."""
    yield (), code
    for place, constant in enumerate(code.co_consts):
        if isinstance(constant, types.CodeType):
            for within, found in nested_codes(constant):
                yield (place, *within), found


def _hash(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_CLASS_DICT: Callable[[type], Any] = type.__dict__["__dict__"].__get__
_DEEPEST = 4  # functions behind functions, parts of parts
_EMPTY = types.CellType()
# Patterns take it for a sequence, for a mapping; no instances, immutable, of the heap.
_LASTING_FLAGS = 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9
# Names that Python or its library puts into a class while it lives, or that say nothing of what it does.
_VOLATILE = frozenset(
    {
        "__dict__", "__weakref__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl", "__slotnames__",
        "__firstlineno__", "__static_attributes__", "__parameters__",
    }
)  # fmt: skip
_HOLDERS: dict[type, tuple[str, ...]] = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),  # noqa: TID251 - the program's
    torch._C.ScriptFunction: ("_torchdynamo_inline",),
}
_GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
_PLAIN = frozenset(
    {
        int, float, complex, bool, str, bytes, type(None), type(...), type(NotImplemented), range, torch.dtype,
        torch.device, torch.layout, torch.memory_format, torch.Size,
    }
)  # fmt: skip
# Immutable values that are no more than what these say.
_CONSTANTS: dict[type, Callable[[Any], object]] = {
    **dict.fromkeys((decimal.Decimal, fractions.Fraction, datetime.timedelta, datetime.date, torch.qscheme), repr),
    **dict.fromkeys((pathlib.PosixPath, pathlib.PurePosixPath), str),
    **dict.fromkeys((torch.finfo, torch.iinfo), lambda facts: (type(facts), facts.dtype)),
    re.Pattern: lambda pattern: (pattern.pattern, pattern.flags),
}
_C_FUNCTIONS = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
_TOLD_BY_TEXT: tuple[type, ...] = (
    types.GenericAlias, types.UnionType,
    typing.TypeVar, typing.ParamSpec, torch._ops.OpOverload, torch._ops.OpOverloadPacket, type(typing.Any),
    type(typing.Optional), type(list[int]), type(torch.__version__), type(typing.Union[int, str]),
    type(sys.version_info), type(sys.flags), type(sys.float_info), type(sys.int_info),
)  # fmt: skip
