"""The objects that the program did not make: known by identity, with the source each was reached by.

`Externals.wrap(value, source)` is called at every read of the outside world. It records the guard that
makes the read repeatable and returns what the program sees: a fake for a tensor, a shadow copy for a
container, a symbol for a number that changes, and the object itself for everything else.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from primtorch.fake import FakeTensor
from primtorch.quantised import is_taken_apart
from primtorch.schemas import UserFrame
from primtorch.wrappers import is_wrapper
from torchdynamo.arrays.values import Array, fits_tensor, is_number_of_torch
from torchdynamo.graph import numpy_values
from torchdynamo.graph.jagged import is_jagged, stands_for_one
from torchdynamo.graph.run_time_texts import HANDED_ON
from torchdynamo.graph.tensor_classes import PLAIN_TENSORS, UNINITIALIZED, hidden_method, is_capturable
from torchdynamo.interpreter.classes import may_change, native_base
from torchdynamo.interpreter.iterators import (
    EnumerateIterator,
    FilterIterator,
    LocalIterator,
    MapIterator,
    MappingIterator,
    ReversedIterator,
    Rounds,
    SequenceIterator,
    ZipIterator,
)
from torchdynamo.outside.growing_lists import Ends, GrowingDict, GrowingList, GrowingTuple
from torchdynamo.outside.guard_set import GuardSet
from torchdynamo.outside.loops import OpenRange
from torchdynamo.reasons import BreakGraph, Uninitialized
from torchdynamo.schemas import GuardKind, TensorGuard
from torchdynamo.sources import (
    Attribute,
    DictKeyAt,
    Global,
    Item,
    Pinned,
    Reading,
    Source,
    base_of,
    own_keys,
    own_length,
    table_shown,
)

# Values compared by equality and type: immutable, without parts that could change.
CONSTANT_TYPES: frozenset[type] = frozenset(
    {
        int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range,
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
        torch.qscheme, decimal.Decimal, fractions.Fraction, datetime.timedelta, datetime.date, datetime.datetime,
        pathlib.PosixPath, pathlib.PurePosixPath, re.Pattern, *numpy_values.SCALARS,
        *numpy_values.DTYPES,
    }
)  # fmt: skip

# Immutable built-in bases: an object of a subclass is compared by equality as well, and has attributes besides.
ATOMS: tuple[type, ...] = (str, int, float, complex, bytes)

# Values that stand for themselves: compared by identity, and held by the compiled code.
IDENTITY_TYPES: tuple[type, ...] = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.GenericAlias, types.UnionType, property, staticmethod, classmethod, enum.Enum,
    operator.itemgetter, operator.attrgetter, operator.methodcaller, typing.TypeVar, typing.ParamSpec,
    *((typing.TypeAliasType,) if hasattr(typing, "TypeAliasType") else ()),  # of `type X = ...`, from 3.12 on
    torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops._OpNamespace, torch._ops._Ops, type(typing.Any),
    type(typing.Optional), type(list[int]),
)  # fmt: skip

# Facts of the installation: each is one object, which nobody changes.
_FACTS = (sys.version_info, sys.flags, sys.float_info, sys.int_info, torch.__version__)
_RECORDS_OF_THE_SYSTEM: frozenset[type] = frozenset(map(type, _FACTS))

# Containers that are shadowed, by built-in base.
CONTAINER_BASES: tuple[type, ...] = (dict, list, set, collections.deque, tuple, frozenset)

# Functions, classes and modules of these packages are taken as fixed: what stands for a name of theirs is not guarded.
# Their mutable data is guarded like any other.
_FIXED_PACKAGES = frozenset(
    {"builtins", "typing", "collections", "functools", "abc", "enum", "contextlib", "inspect", "operator",
     "math", "itertools", "types", "copy", "dataclasses", "warnings", "logging", "re", "os", "sys", "_weakrefset"}
)  # fmt: skip
# The code of these packages' functions is taken as fixed. A name of torch's may come to stand for another function:
# libraries replace `F.linear`, `nn.Linear.forward` or `torch.Tensor.relu` to log, to quantize, to patch.
TRUSTED_PACKAGES = _FIXED_PACKAGES | {"torch"}


class TensorInputs(Protocol):
    """Who turns an external tensor or number into a graph input."""

    def tensor_input(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        """The fake of an input, the same one each time."""

    def wrapper_input(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        """That of a tensor that wraps others."""

    def jagged_input(self, tensor: NestedTensor, source: Source) -> torch.Tensor:
        """That of a nested tensor."""

    def quantised_input(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        """That of a quantised tensor."""

    def seqlen(self, value: int, source: Source) -> int | float | torch.SymInt | torch.SymFloat:
        """The length of a nested tensor's shortest or longest row."""

    def array_input(self, array: object, source: Source) -> Array:
        """What stands for a NumPy array."""

    def scalar_input(self, scalar: object, source: Source) -> Array:
        """What stands for a NumPy scalar."""

    def number(self, value: int | float, source: Source) -> int | float | torch.SymInt | torch.SymFloat:
        """A number, or the symbol that it has become."""

    def text(self, value: object, source: Source) -> object:
        """A text, or the one of run time that it has become."""

    def steps(self, source: Source) -> bool:
        """Whether the iterator there is advanced for real."""

    def grows(self, source: Source) -> bool:
        """Whether the list there was of another length at every call."""

    def ends_at(self, source: Source, value: object) -> Ends:
        """What of a container there ends the graph, at another length."""

    def changes(self, source: Source) -> bool:
        """Whether something at or beneath the source differed between calls."""


@dataclass(slots=True)
class External:
    """An object of the outside world and what the program sees in its place."""

    original: Any
    source: Source
    value: Any
    sources: set[Source] = field(default_factory=set)
    snapshot: Any = None  # contents of a shadow when it was made, to tell whether the program changed it


class Pins:
    """Objects that guards and generated code hold by reference."""

    def __init__(self) -> None:
        self.objects: list[object] = []
        self._index: dict[int, int] = {}

    def source(self, obj: object, label: str | None = None) -> Pinned:
        """The source of an object that is held by reference; one object has one."""
        index = self._index.get(id(obj))
        if index is None:
            index = self._index[id(obj)] = len(self.objects)
            self.objects.append(obj)
        return Pinned(index, label or str(getattr(obj, "__name__", type(obj).__name__)))


class Externals:
    """The table. `guard` records a check, `wrap` admits an object."""

    def __init__(self, inputs: TensorInputs, user_frames: Callable[[], tuple[UserFrame, ...]]) -> None:
        self.guards = GuardSet()
        self.pins = Pins()
        self.inputs = inputs
        self.user_frames = user_frames
        self.by_original: dict[int, External] = {}
        self.by_value: dict[int, External] = {}
        self.opaque: dict[int, External] = {}  # objects of C types whose data no guard can watch
        self.shadows: list[External] = []
        self.hashed: dict[int, External] = {}  # that sets and dicts told apart by their identity
        self.arrays = numpy_values.Arrays(lambda value: self.lookup(value) is not None)
        self.cells: list[Source] = []  # of functions that are made anew at each call
        self._classes: set[type] = set()
        self._class_sources: dict[int, Pinned] = {}  # by the class's identity, which is pinned
        self.world: object = None  # of the iterators that the program goes on with
        self.written_behind: list[object] | None = None  # by what is said behind the graph: it has not come there yet
        self.fixed: list[tuple[Source, object]] = []  # what is read by names that are taken as fixed, without a guard
        self.knows_hooks_of_all = False  # guards say that there are none that run for each module
        self.unkept = ""  # what capture has taken over from this process that another one cannot be held to

    def guard(self, source: Source | None, kind: GuardKind, payload: object) -> None:
        """Compiled code asks this of the source at each call; the user's frames now are told where it fails."""
        self.guards.add(source, kind, payload, self.user_frames)

    def lookup(self, value: object) -> External | None:
        """The record of a value that the program holds, if it stands for an external object."""
        known = self.by_value.get(id(value))
        return known if known is not None and known.value is value else None

    # -- admission --------------------------------------------------------------------------

    def wrap(self, value: Any, source: Source) -> Any:
        """What the program sees of a value that it reads at the source: an input, a shadow, or itself, guarded."""
        kind = type(value)
        if kind is int or kind is float:
            return self.inputs.number(value, source)
        if kind in HANDED_ON:
            return self.inputs.text(value, source)
        if is_number_of_torch(kind) and (kind not in numpy_values.SCALARS or self.inputs.changes(source)):
            return self.inputs.scalar_input(value, source)
        if (kind in CONSTANT_TYPES or isinstance(value, CONSTANT_BASES)) and not (
            kind in (torch.Size, range) and self.inputs.changes(source)
        ):
            self.guard(source, GuardKind.EQUALS, value)
            return value
        known = self.by_original.get(id(value))
        if known is not None and known.original is value:
            if source not in known.sources:
                known.sources.add(source)
                if not isinstance(known.source, Pinned):
                    self.guard(source, GuardKind.SAME_OBJECT, known.source)
                else:
                    self._guard_identity(value, source)
            return known.value
        if id(value) in self.by_value and self.by_value[id(value)].value is value:
            return value
        return self._admit(value, kind, source)

    def hold(self, value: object, label: str) -> object:
        """Admits an object that the compiled code holds by reference."""
        return self.wrap(value, self.pins.source(value, label))

    def _admit(self, value: Any, kind: type, source: Source) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, source)
        if kind in _BOUND_C_METHODS and _is_bound(value):
            return self._bound_c_method(value, kind, source)
        if isinstance(value, LocalIterator):
            return self._iterator(value, kind, source)
        if kind is types.FunctionType and self.inputs.changes(source):
            return self._function_made_anew(value, source)
        if isinstance(value, IDENTITY_TYPES):
            return self._identity(value, source)
        if isinstance(value, tuple) and is_constant(value) and not self.inputs.changes(source):
            self.guard(source, GuardKind.EQUALS, value)
            return value
        if kind in _RECORDS_OF_THE_SYSTEM:
            return self._identity(value, source)
        if kind is dict and "__builtins__" in value:
            return self.namespace(value, source)
        if isinstance(value, CONTAINER_BASES):
            return self._container(value, kind, source)
        rule = _REBUILT.get(kind)
        if rule is not None and not _shows_no_table(value, kind):
            self.guard(source, GuardKind.TYPE, kind)
            return self._register(value, source, rule(self, value, source)).value
        self.guard(source, GuardKind.TYPE, kind)
        if fits_tensor(value):
            return self._register(value, source, self.inputs.array_input(value, source)).value
        if isinstance(value, ATOMS) and kind.__module__ != "numpy":
            if not any(kind.__eq__ is base.__eq__ for base in ATOMS):
                raise BreakGraph("unsupported_read", f"{source.expression()} is a {kind.__qualname__} with its own ==")
            self.guard(source, GuardKind.EQUALS, value)
        known = self._register(value, source, value)
        if is_opaque(kind) or isinstance(value, BaseException):
            self.opaque[id(value)] = known
        return known.value

    def tell_apart(self, *values: object) -> None:
        """C code hashes or compares these values: what has no method for that is known by its identity."""
        todo, seen = list(values), set()
        while todo:
            value = todo.pop()
            parts = _COMPARED_PARTS.get(type(value))
            if parts is not None:
                if id(value) not in seen:
                    seen.add(id(value))
                    todo.extend(parts(value))
                continue
            known = self.lookup(value)
            if known is not None and _is_known_by_identity(type(known.original)):
                self.hashed[id(known.original)] = known

    def class_source(self, kind: type) -> Pinned:
        """Where guards find a class."""
        source = self._class_sources.get(id(kind))
        if source is None:
            source = self.pins.source(kind, f"{kind.__module__}.{kind.__qualname__}")
            self._class_sources[id(kind)] = source
        return source

    def know_class(self, kind: type) -> None:
        """Something depends on the classes that `kind` inherits from: they have to be the same."""
        if kind not in self._classes:
            self._classes.add(kind)
            if may_change(kind) and not is_trusted_module(kind.__module__):
                mro = Attribute(self.pins.source(kind), "__mro__", native=True)
                self.guard(mro, GuardKind.IDENTITY, kind.__mro__)

    def _register(self, original: object, source: Source, value: object) -> External:
        known = External(original, source, value, {source})
        self.by_original[id(original)] = known
        self.by_value[id(value)] = known
        return known

    def _tensor(self, tensor: torch.Tensor, source: Source) -> object:
        if isinstance(tensor, FakeTensor):
            return tensor
        if isinstance(tensor, UNINITIALIZED):
            raise Uninitialized(f"{source.expression()} is a {type(tensor).__qualname__}")
        if stands_for_one(tensor):
            return tensor
        if is_jagged(tensor):
            return self._register(tensor, source, self.inputs.jagged_input(tensor, source)).value
        if type(tensor) in PLAIN_TENSORS and is_taken_apart(tensor):
            return self._register(tensor, source, self.inputs.quantised_input(tensor, source)).value
        if is_wrapper(type(tensor)):
            return self._register(tensor, source, self.inputs.wrapper_input(tensor, source)).value
        if type(tensor) not in PLAIN_TENSORS and (not is_capturable(type(tensor)) or outside_graphs(tensor)):
            raise BreakGraph("tensor_subclass", f"{source.expression()} is a {type(tensor).__qualname__}")
        if stays_outside(tensor):  # an object like any other, until the program uses it as a tensor
            self.guard(source, GuardKind.PREDICATE, stays_outside)
            return self._register(tensor, source, tensor).value
        fake = self.inputs.tensor_input(tensor, source)
        return self._register(tensor, source, fake).value

    def refuse(self, tensor: torch.Tensor) -> None:
        """The program uses a tensor of the outside. Raises BreakGraph for one that stays there."""
        if not isinstance(tensor, FakeTensor) and not stands_for_one(tensor):
            known = self.lookup(tensor)
            name = "a tensor" if known is None else known.source.expression()
            raise BreakGraph("special_tensor", f"{name} {outside_graphs(tensor)}")

    def _identity(self, value: object, source: Source) -> object:
        self._guard_identity(value, source)
        known = self._register(value, self.pins.source(value), value)
        known.sources.add(source)
        return value

    def namespace(self, value: dict[str, object], source: Source) -> dict[str, object]:
        """The globals of a module as a dict: looking into it breaks the graph, they are read name by name elsewhere."""
        known = self.by_original.get(id(value))
        if known is None:
            self._identity(value, source)
            known = self.by_original[id(value)]
        self.opaque[id(value)] = known
        return value

    def _function_made_anew(self, value: types.FunctionType, source: Source) -> object:
        """A function that is another object at each call, of the same code: its parts are what is guarded."""
        self.guard(source, GuardKind.TYPE, types.FunctionType)
        for name in ("__code__", "__globals__"):
            self.guard(Attribute(source, name, native=True), GuardKind.IDENTITY, getattr(value, name))
        for index, cell in enumerate(value.__closure__ or ()):
            self._cell(cell, Item(Attribute(source, "__closure__", native=True), index))
        return self._register(value, source, value).value

    def _cell(self, cell: types.CellType, source: Source) -> None:
        known = self.by_original.get(id(cell))
        if known is None:
            for other in self.cells:
                self.guard(source, GuardKind.DISTINCT_OBJECT, other)
            self.cells.append(source)
            self._register(cell, source, cell)
        elif isinstance(known.source, Pinned):
            self.guard(source, GuardKind.IDENTITY, cell)
        else:
            self.guard(source, GuardKind.SAME_OBJECT, known.source)

    def _guard_identity(self, value: object, source: Source) -> None:
        if isinstance(source, Pinned):
            return
        if _is_fixed(value, source):
            self.fixed.append((source, value))
            return
        self.guard(source, GuardKind.IDENTITY, value)

    def _bound_c_method(
        self, value: types.BuiltinFunctionType | types.MethodWrapperType, kind: type, source: Source
    ) -> object:
        """A C method bound to an object (`names.append`): bound anew to what stands for the object."""
        self.guard(source, GuardKind.TYPE, kind)
        self.guard(Attribute(source, "__name__", native=True), GuardKind.EQUALS, value.__name__)
        owner = self.wrap(value.__self__, Attribute(source, "__self__", native=True))
        hidden = hidden_method(value.__self__, value.__name__)
        method = getattr(owner, value.__name__) if hidden is None else hidden.__get__(owner)
        return self._register(value, source, method).value

    def _iterator(self, value: LocalIterator, kind: type, source: Source) -> object:
        """An iterator of an earlier part of the program: the same state over what stands for its parts."""
        fields = () if kind is Rounds else ITERATOR_FIELDS.get(kind)
        if fields is None:
            raise BreakGraph("generator", f"{source.expression()} is an iterator that capture cannot take over")
        self.guard(source, GuardKind.TYPE, kind)
        if not fields or self.inputs.steps(source):
            return self._register(value, source, value).value
        copied: object = object.__new__(kind)
        known = self._shadow_record(value, source, copied)
        for name in fields:
            part, where = getattr(value, name), Attribute(source, name, native=True)
            if type(part) is int:
                self.guard(where, GuardKind.EQUALS, part)
            else:
                part = self.wrap(part, where)
            object.__setattr__(copied, name, part)
        if isinstance(copied, MappingIterator):
            copied.start()
        if "native" in getattr(kind, "__slots__", ()):
            object.__setattr__(copied, "native", value.native)
        if "world" in getattr(kind, "__slots__", ()):
            object.__setattr__(copied, "world", self.world)
        known.snapshot = {name: getattr(copied, name) for name in fields}
        return copied

    # -- containers -------------------------------------------------------------------------

    def _may_grow(self, value: object, kind: type, source: Source) -> bool:
        """Whether an empty one may stand for a list, a tuple or a dict: C code that shows a table would show that."""
        is_shown = isinstance(source, Reading) and source.read is table_shown
        is_read_natively = (
            kind is tuple and value and is_constant(value)
        )  # a function's defaults, fields, a format's values
        return self.inputs.grows(source) and not is_shown and not is_read_natively

    def _container(self, value: Any, kind: type, source: Source) -> object:
        self.guard(source, GuardKind.TYPE, kind)
        if value is self.written_behind:
            raise BreakGraph("ambient_state", "a list that collects warnings, after one was given")
        if kind in _GROW and self._may_grow(value, kind, source):
            stand_in = _GROW[kind](source, told_by(value), self.inputs.ends_at(source, value))
            if kind is tuple:
                return self._register(value, source, stand_in).value
            return self._shadow(value, source, stand_in, kind())
        if isinstance(value, dict):
            return self._dict(value, kind, source)
        if isinstance(value, (set, frozenset)):
            items = frozenset(value)
            self.guard(source, GuardKind.SET_ITEMS, items)
            self._know_keys(items, source)
            shadow: Any = value
            if isinstance(value, set):
                shadow = set.__new__(kind)
                set.update(shadow, items)
            return self._shadow(value, source, shadow, set(items))
        self.guard(source, GuardKind.LENGTH, own_length(value))
        if isinstance(value, tuple):
            own = _own_lookup(kind, tuple)
            parts = tuple(
                self.wrap(item, Item(source, index, own=own)) for index, item in enumerate(tuple.__iter__(value))
            )
            # Sizes and torch.return_types are none that `tuple` could make.
            direct = kind is torch.Size or hasattr(kind, "n_sequence_fields")
            made = kind(parts) if direct else tuple.__new__(kind, parts)
            return self._register(value, source, made).value
        if isinstance(value, list):
            shadow = list.__new__(kind)
            known = self._shadow_record(value, source, shadow)
            own = _own_lookup(kind, list)
            placed = enumerate(list.__iter__(value))
            list.extend(shadow, (self.wrap(item, Item(source, i, own=own)) for i, item in placed))
            known.snapshot = list(list.__iter__(shadow))
            return shadow
        if kind is not collections.deque:
            raise BreakGraph("unsupported_read", f"{source.expression()} is a subclass of deque")
        queue = collections.deque((self.wrap(item, Item(source, i)) for i, item in enumerate(value)), value.maxlen)
        return self._shadow(value, source, queue, list(queue))

    def _dict(self, value: dict[object, object], kind: type, source: Source) -> object:
        keys = own_keys(value)
        self.guard(source, GuardKind.DICT_KEYS, keys)
        self._know_keys((key for key in keys if not isinstance(key, torch.Tensor)), source)
        allocate: Any = collections.OrderedDict.__new__ if issubclass(kind, collections.OrderedDict) else dict.__new__
        shadow = allocate(kind)
        known = self._shadow_record(value, source, shadow)
        if isinstance(value, collections.defaultdict):
            shadow.default_factory = self.wrap(value.default_factory, Attribute(source, "default_factory", native=True))
        setter = collections.OrderedDict.__setitem__ if isinstance(value, collections.OrderedDict) else dict.__setitem__
        for index, key in enumerate(keys):
            pin = None if _is_literal(key) else self.pins.source(key, "key").key
            item = self.wrap(dict.__getitem__(value, key), Item(source, key, pin, _own_lookup(kind, dict)))
            if isinstance(key, torch.Tensor):
                key = self.wrap(key, DictKeyAt(source, index))
            setter(shadow, key, item)
        known.snapshot = dict(dict.items(shadow))
        return shadow

    def _know_keys(self, keys: Iterable[object], source: Source) -> None:
        """Keys that are found by their identity: the program may reach them in other ways, too."""
        for key in keys:
            if isinstance(key, torch.Tensor):
                raise BreakGraph("unsupported_read", f"{source.expression()} holds a tensor among its keys")
            if type(key) is tuple or type(key) is frozenset:
                self._know_keys(key, source)
            elif _is_known_by_identity(type(key)) and not isinstance(key, IDENTITY_TYPES):
                self.tell_apart(self.hold(key, "key"))

    def _shadow_record(self, original: object, source: Source, shadow: object) -> External:
        known = self._register(original, source, shadow)
        self.shadows.append(known)
        return known

    def _shadow(self, original: object, source: Source, shadow: object, snapshot: object) -> object:
        known = self._shadow_record(original, source, shadow)
        known.snapshot = snapshot
        return shadow


# What stands for a container that may be of another length at each call.
# None stands for a set: a set compares itself with a frozenset, and a dict's keys with both, by what is in the other's
# memory, whatever the other's class says.
_GROW: dict[type, Any] = {list: GrowingList, tuple: GrowingTuple, dict: GrowingDict}

# State of the interpreter's iterators, without the parts that follow from it.
ITERATOR_FIELDS: dict[type, tuple[str, ...]] = {
    SequenceIterator: ("sequence", "index"),
    MappingIterator: ("container", "view", "consumed"),
    MapIterator: ("fn", "iterators"),
    FilterIterator: ("fn", "iterator", "keep"),
    ZipIterator: ("iterators", "strict"),
    EnumerateIterator: ("iterator", "count"),
    ReversedIterator: ("sequence", "index"),
}
_BOUND_C_METHODS = frozenset({types.BuiltinFunctionType, types.MethodWrapperType})
CONSTANT_BASES: tuple[type, ...] = (type(None),)


def _is_bound(value: types.BuiltinFunctionType | types.MethodWrapperType) -> bool:
    """A C method of an object, unlike a module's function (whose `__self__` is its module or a private record)."""
    owner = value.__self__
    if isinstance(owner, (type, types.ModuleType, type(None))):
        return False
    # Of a class alone: `hasattr` would ask its metaclass, too, and every class is called.
    return any(value.__name__ in vars(base) for base in type(owner).__mro__)


def _is_literal(key: object) -> bool:
    """Whether a key of a dict can be written in generated code."""
    return type(key) in _LITERALS or (type(key) is tuple and all(map(_is_literal, key)))


_LITERALS = frozenset({str, int, bool, bytes, type(None)})


def is_constant(value: object) -> bool:
    """An immutable value without parts that have an identity of their own."""
    if type(value) is tuple or type(value) is frozenset:
        return all(map(is_constant, value))
    return (type(value) in CONSTANT_TYPES and type(value) is not int) or type(value) is int


def told_by(container: object) -> int:
    """By what one of several lists, tuples and dicts in one place is known: its length, or what its keys are."""
    if not isinstance(container, dict):
        return own_length(container)
    keys = own_keys(container)
    return hash(keys) if all(map(is_constant, keys)) else own_length(container)


def outside_graphs(tensor: torch.Tensor) -> str | None:
    """Why a plain tensor can be no input of a graph, to follow its name."""
    with torch._C.DisableTorchFunction():
        if tensor.is_nested:
            return "is a nested tensor"
        if tensor.layout is not torch.strided:
            return f"has the layout {tensor.layout}"
        if tensor.is_quantized and not is_taken_apart(tensor):
            return f"is quantised, and has the dtype {tensor.dtype}"
        if tensor.is_conj() or tensor.is_neg():
            return "is conjugated or negated where it is read"
        if tensor._is_zerotensor():
            return "stands for zeros, and has no memory"
        try:
            tensor.is_leaf  # noqa: B018 - of a view that a write left behind, autograd makes the history only now
        except RuntimeError:
            return "has a history that autograd refuses to make"
    return None


def stays_outside(tensor: torch.Tensor) -> bool:
    """Whether a value is a plain tensor that can be no input of a graph."""
    return type(tensor) in PLAIN_TENSORS and outside_graphs(tensor) is not None


def tensor_guard(tensor: torch.Tensor, dynamic: Mapping[int, object], free_strides: bool = False) -> TensorGuard:
    """What compiled code relies on of an input's metadata; `dynamic` names the dims left to shape guards, and the
    strides are left to these with any of them, or where they are `free_strides`."""
    parameter = isinstance(tensor, torch.nn.Parameter)
    return TensorGuard(
        type=type(tensor),
        dtype=tensor.dtype,
        device=tensor.device,
        requires_grad=tensor.requires_grad,
        sizes=tuple(None if dim in dynamic else size for dim, size in enumerate(tensor.shape)),
        strides=tuple(None for _ in tensor.shape) if dynamic or free_strides else tuple(tensor.stride()),
        is_leaf=None if not tensor.requires_grad else tensor.is_leaf,
        dispatch_keys=torch._C._dispatch_keys(tensor).raw_repr(),
        is_parameter=parameter,
    )


def is_opaque(kind: type) -> bool:
    """A type of C whose objects hold data (an array, a buffer, a proxy): no guard can watch more than their type."""
    if kind is types.SimpleNamespace:  # attributes are read one by one; as a whole it is not compared, shown or copied
        return True
    native: Any = native_base(kind)  # a class statement adds only attributes and methods, which are guarded
    if native is not kind and native in ATOMS:
        return False  # compared by value
    return native.__eq__ is not object.__eq__ or any(hasattr(native, name) for name in _DATA_METHODS)


def _is_known_by_identity(kind: type) -> bool:
    """Whether objects of a type are hashed, or found equal, by their identity."""
    return kind.__hash__ in _IDENTITY_HASHES or vars(object)["__eq__"] is kind.__eq__


_IDENTITY_HASHES: tuple[object, ...] = (object.__hash__, torch.Tensor.__hash__)
# The views of dicts, and what makes them.
VIEWS: dict[type, Callable[[Any], object]] = {
    type(make(base())): make
    for base in (dict, collections.OrderedDict)
    for make in (base.keys, base.values, base.items)
}
TABLES_SHOWN: tuple[type, ...] = (types.MappingProxyType, *VIEWS)  # that hold no more than a mapping
# What is compared, or hashed, part by part.
_COMPARED_PARTS: dict[type, Callable[[Any], Iterable[object]]] = {
    **{kind: kind.__iter__ for kind in (list, tuple, collections.deque, set, frozenset)},
    **{kind: lambda table: [*table.keys(), *table.values()] for kind in (dict, collections.OrderedDict)},
    collections.defaultdict: lambda table: [*table.keys(), *table.values()],
    types.MappingProxyType: lambda table: [*table.keys(), *table.values()],
    **dict.fromkeys(VIEWS, iter),
    types.MethodType: lambda method: (method.__self__,),
    slice: lambda part: (part.start, part.stop, part.step),
}
_DATA_METHODS = ("__getitem__", "__len__", "__float__", "__index__", "__array__")


def is_trusted_module(module: str) -> bool:
    """Whether a module's code and names are taken as fixed: torch's, and of Python's library `_FIXED_PACKAGES`."""
    return module.partition(".")[0] in TRUSTED_PACKAGES


def is_fixed_module(module: str) -> bool:
    """Whether a module is of `_FIXED_PACKAGES`."""
    return module.partition(".")[0] in _FIXED_PACKAGES


def _is_fixed(value: object, source: Source) -> bool:
    """A function, class or module that is read from a package whose names are taken as fixed."""
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)):
        return False
    base = base_of(source)
    owner = source.module if isinstance(source, Global) else base.label if isinstance(base, Pinned) else None
    return owner is not None and is_fixed_module(owner)


def _bound_method(externals: Externals, value: types.MethodType, source: Source) -> types.MethodType:
    function = externals.wrap(value.__func__, Attribute(source, "__func__", native=True))
    return types.MethodType(function, externals.wrap(value.__self__, Attribute(source, "__self__", native=True)))


def _slice(externals: Externals, value: slice, source: Source) -> slice:
    parts = (externals.wrap(getattr(value, n), Attribute(source, n, native=True)) for n in ("start", "stop", "step"))
    return slice(*parts)


def _partial(externals: Externals, value: functools.partial[object], source: Source) -> functools.partial[object]:
    function, args, keywords = (
        externals.wrap(getattr(value, name), Attribute(source, name, native=True))
        for name in ("func", "args", "keywords")
    )
    return functools.partial(function, *args, **keywords)


def _range(externals: Externals, value: range, source: Source) -> OpenRange:
    """One whose numbers are others in each round of a loop."""
    parts = (externals.wrap(getattr(value, n), Attribute(source, n, native=True)) for n in ("start", "stop", "step"))
    return OpenRange(tuple(parts))


def _shows_no_table(value: object, kind: type) -> bool:
    """Whether this is a proxy of what is no dict, or of a class's own, whose names are read one by one."""
    if kind is not types.MappingProxyType:
        return False
    table = table_shown(value)
    return not isinstance(table, dict) or {"__module__", "__doc__"} <= table.keys()


def _proxy(externals: Externals, value: types.MappingProxyType[object, object], source: Source) -> object:
    return types.MappingProxyType(_table_behind(externals, value, source))


def _view(externals: Externals, value: object, source: Source) -> object:
    """`d.keys()`, `d.values()` or `d.items()` of what stands for the dict."""
    return VIEWS[type(value)](_table_behind(externals, value, source))


def _table_behind(externals: Externals, value: object, source: Source) -> Any:
    """What stands for the mapping that a proxy or a view shows, with all that is in it."""
    table = externals.wrap(table_shown(value), Reading(source, table_shown))
    if isinstance(table, GrowingDict):  # which the program has by another name, too
        raise table.refusal()
    return table


def _own_lookup(kind: Any, base: Any) -> str:
    """The built-in class whose lookup is to be named, as that of `kind` is another one."""
    name: str = base.__name__
    return "" if kind.__getitem__ is base.__getitem__ else name


# Immutable records that are taken apart at the read and made anew around their wrapped parts.
_REBUILT: dict[type, Callable[[Externals, Any, Source], object]] = {
    types.MethodType: _bound_method,
    slice: _slice,
    range: _range,
    functools.partial: _partial,
    types.MappingProxyType: _proxy,
    **dict.fromkeys(VIEWS, _view),
}
