"""Classes as the program sees them: attributes along the MRO, writes to them, and classes that it makes itself."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

from torchdynamo.interpreter.classes import may_change
from torchdynamo.outside.externals import Externals, is_fixed_module, is_trusted_module
from torchdynamo.outside.overlays import DELETED, MISSING, Overlays
from torchdynamo.reasons import BreakGraph
from torchdynamo.schemas import GuardKind
from torchdynamo.sources import Attribute, InstanceAttribute, Source

Found = tuple[object, type]


class Classes:
    """The classes that one capture meets.

    Args:
        ambient: asks a function for what guards are to compare with its answer.

    Attributes:
        made: the classes that the program made itself, each with its ordinal.
        refused: the ordinal of the class at whose making the graph ends.
    """

    def __init__(self, externals: Externals, overlays: Overlays, ambient: Callable[..., object]) -> None:
        self.externals = externals
        self.overlays = overlays
        self._ambient = ambient
        self.made: dict[type, int] = {}
        self.refused = -1
        self._count = 0
        self.found: dict[tuple[int, str], tuple[type, Found | None]] = {}  # by the class's identity; see `get`
        self._writes = 0

    def get(self, kind: type, name: str) -> Found | None:
        """(raw attribute, owner) found along the class's MRO (no descriptor is run), or None.

        That the classes passed on the way lack the name is guarded, for those that a program may change. Functions and
        descriptors, and that there is nothing, are found once, until the program writes anything or makes a class.
        """
        if self._writes != self.overlays.count:
            self._writes = self.overlays.count
            self.found.clear()
        known = self.found.get((id(kind), name))
        if known is not None and known[0] is kind and not self.made:
            return known[1]
        found = self._look_up(kind, name)
        if found is None or isinstance(found[0], _FOUND_ONCE):
            self.found[id(kind), name] = kind, found
        return found

    def _look_up(self, kind: type, name: str) -> Found | None:
        for klass in kind.__mro__:
            if klass is not kind:
                self.externals.know_class(kind)
            written = self.overlays.read(klass, name)
            if written is not MISSING:
                if written is DELETED:
                    continue
                return written, klass
            table = _CLASS_DICT(klass)
            if name in table:
                return self._attribute(klass, name, table[name]), klass
            if may_change(klass) and klass not in self.made and not is_fixed_module(klass.__module__):
                self.externals.guard(self.externals.class_source(klass), GuardKind.INSTANCE_LACKS, name)
        return None

    def _attribute(self, klass: type, name: str, value: object) -> object:
        if not may_change(klass) or klass in self.made:
            return value
        source = InstanceAttribute(self.externals.class_source(klass), name)
        if isinstance(value, _DESCRIPTORS) or (
            hasattr(type(value), "__get__") and not isinstance(value, types.FunctionType)
        ):
            if not is_fixed_module(klass.__module__):
                self._know_descriptor(value, source)
            return value
        return self.externals.wrap(value, source)

    def _know_descriptor(self, descriptor: object, source: Source) -> None:
        """A descriptor stands for itself; the functions that it calls are known as any other."""
        if self.externals.lookup(descriptor) is None:
            self.externals.guard(source, GuardKind.IDENTITY, descriptor)
        for name in ("fget", "fset", "fdel", "__func__"):
            part = getattr(descriptor, name, None) if isinstance(descriptor, _FUNCTION_HOLDERS) else None
            if isinstance(part, types.FunctionType) and self.externals.lookup(part) is None:
                self.externals._register(part, self.externals.pins.source(part), part)

    def set(self, kind: type, name: str, value: object) -> None:
        """`kind.name = value`: at once for a class that the program made, else kept aside."""
        if kind in self.made:
            type.__setattr__(kind, name, value)
        else:
            self._know(kind)
            self.overlays.write(kind, name, value)

    def delete(self, kind: type, name: str) -> None:
        """`del kind.name`. Raises AttributeError where the class itself has no such name."""
        if kind in self.made:
            type.__delattr__(kind, name)
            return
        self._know(kind)
        written = self.overlays.read(kind, name)
        if written is MISSING and name in _CLASS_DICT(kind):
            self._attribute(kind, name, _CLASS_DICT(kind)[name])
        elif written is MISSING or written is DELETED:
            raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}")
        self.overlays.write(kind, name, DELETED)

    def make(self, name: object, make: Callable[[], object]) -> object:
        """A class that the program makes itself; the graph ends before one that has to be made at each call."""
        self._count += 1
        if self._count == self.refused:
            raise BreakGraph("class", f"{name} outlives the graph")
        ordinal, kind = self._count, make()
        if isinstance(kind, type):
            self.made[kind] = ordinal
        return kind

    def begin(self, kind: type) -> None:
        """`type.__new__` has made a class, of which a metaclass of the program's or of Python's makes more."""
        self.made.setdefault(kind, self._count)

    def namespace(self, kind: type) -> Mapping[str, object]:
        """`kind.__dict__`: each of its attributes is read."""
        table = _CLASS_DICT(kind)
        if kind in self.made or not may_change(kind) or is_trusted_module(kind.__module__):
            return table  # type: ignore[no-any-return]
        self._ambient(_class_names, (kind,))
        found = {name: self._attribute(kind, name, value) for name, value in table.items()}
        self.overlays.put(kind, found)
        return types.MappingProxyType(found)

    def fact(self, kind: type, name: str, value: object) -> object:
        """A class's name, module, text or annotations, which may be assigned to while it is the same class."""
        if kind in self.made or not may_change(kind) or is_trusted_module(kind.__module__):
            return value
        return self.externals.wrap(
            value, Attribute(self.externals.class_source(kind), name, not may_change(type(kind)))
        )

    def _know(self, kind: type) -> None:
        """A class of the outside that the program changes."""
        if self.externals.lookup(kind) is None:
            self.externals._register(kind, self.externals.pins.source(kind), kind)


def _class_names(kind: type) -> tuple[str, ...]:
    return tuple(_CLASS_DICT(kind))


_CLASS_DICT = type.__dict__["__dict__"].__get__
# What a class says of itself, and may be assigned to.
FACTS = frozenset({"__name__", "__qualname__", "__module__", "__doc__", "__annotations__"})
_FUNCTION_HOLDERS = (property, classmethod, staticmethod)
_DESCRIPTORS = (
    property, classmethod, staticmethod, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.BuiltinFunctionType,
)  # fmt: skip
_FOUND_ONCE = (types.FunctionType, *_DESCRIPTORS)
