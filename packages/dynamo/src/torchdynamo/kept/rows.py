"""Sources, guards and the places that they tell of, as rows of plain values, and back.

A row names others by their place in a table: a path of a deep module is long, and most of it is its neighbours', too.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from primtorch.schemas import UserFrame
from torchdynamo.kept.contents import NotKept
from torchdynamo.schemas import AmbientRead, GlobalState, Guard, GuardKind, ShapeProgram, TensorGuard, WrittenMemory
from torchdynamo.sources import (
    Argument,
    ClosureCell,
    Global,
    Item,
    Pinned,
    Reading,
    Source,
    base_of,
)

Row: TypeAlias = list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """An object, by its place in the table of names."""

    place: int


_SOURCES: tuple[type, ...] = typing.get_args(Source)
_CODES: Mapping[type, int] = types.MappingProxyType({kind: place for place, kind in enumerate(_SOURCES)})
_TENSOR_FIELDS = tuple(field.name for field in dataclasses.fields(TensorGuard))[1:]
_KINDS = tuple(GuardKind)
_KIND_PLACES: Mapping[GuardKind, int] = types.MappingProxyType({kind: place for place, kind in enumerate(_KINDS)})

# Payloads that are one object, and those that are a plain value.
_OF_OBJECTS = frozenset({GuardKind.TYPE, GuardKind.IDENTITY, GuardKind.PREDICATE})
_OF_VALUES = frozenset(
    {
        GuardKind.EQUALS, GuardKind.LENGTH, GuardKind.DICT_KEYS, GuardKind.SET_ITEMS, GuardKind.INSTANCE_HAS,
        GuardKind.INSTANCE_LACKS, GuardKind.KEY_ABSENT, GuardKind.BOOL,
    }
)  # fmt: skip
_OF_KEYS = frozenset({GuardKind.DICT_KEYS, GuardKind.SET_ITEMS})
_OF_SOURCES = frozenset({GuardKind.SAME_OBJECT, GuardKind.DISTINCT_OBJECT})


def is_plain(value: object) -> bool:
    """Whether a value is written as it is: immutable, and known to `Records`."""
    if type(value) in (tuple, frozenset):
        return all(map(is_plain, value))  # type: ignore[call-overload]
    return type(value) in _PLAIN


_PLAIN = frozenset(
    {
        int, float, complex, bool, str, bytes, range, type(None), torch.dtype, torch.layout, torch.memory_format,
        torch.device,
    }
)  # fmt: skip


class Writer:
    """Tables of sources and places, filled as guards are written.

    Args:
        name: gives the place of an object in the table of names, or raises NotKept.
        pinned: what `Pinned(key)` stands for.
    """

    def __init__(self, name: Callable[[object], int], pinned: Sequence[object]) -> None:
        self.name = name
        self.pinned = pinned
        self.sources: list[Row] = []
        self.frames: list[Row] = []
        self.stacks: list[Row] = []
        self._sources: dict[Source, int] = {}
        self._frames: dict[UserFrame, int] = {}
        self._stacks: dict[tuple[int, int], int] = {}  # by the place of the outer ones, and that of the innermost
        # By identity: most are one object for many.
        self._told: dict[int, tuple[tuple[UserFrame, ...], int]] = {}
        self._told_frames: dict[int, tuple[UserFrame, int]] = {}

    def value(self, value: object) -> object:
        """A plain value as it is, any other object by its name."""
        return value if is_plain(value) else Named(self.name(value))

    def source(self, source: Source) -> int:
        """The place of a source."""
        place = self._sources.get(source)
        if place is None:
            code = _CODES.get(type(source))
            if code is None:
                raise NotKept(f"a {type(source).__name__}")
            row: Row = [code]
            base = base_of(source)
            if base is not None:
                row.append(self.source(base))
            row += self._fields(source)
            place = self._sources[source] = len(self.sources)
            self.sources.append(row)
        return place

    def _fields(self, source: Source) -> Row:
        match source:
            case Pinned(key=key, label=label):
                self.name(self.pinned[key])
                return [key, label]
            case Item(key=key, pin=pin, own=own):
                if pin is not None:
                    self.name(self.pinned[pin])
                return [None if pin is not None else self.value(key), pin, own]
            case Reading(read=read, name=name):
                return [self.value(read), name]
        return [getattr(source, name) for name in _fields_behind_base(type(source))]

    def stack(self, frames: tuple[UserFrame, ...]) -> int:
        """The place of a stack of the user's frames; -1 for none."""
        if id(frames) not in self._told:
            self._told[id(frames)] = frames, self._stack(frames)
        return self._told[id(frames)][1]

    def _stack(self, frames: tuple[UserFrame, ...]) -> int:
        place = -1
        for frame in frames:
            row = place, self._frame(frame)
            known = self._stacks.get(row)
            if known is None:
                known = self._stacks[row] = len(self.stacks)
                self.stacks.append(list(row))
            place = known
        return place

    def _frame(self, frame: UserFrame) -> int:
        told = self._told_frames.get(id(frame))
        if told is not None:
            return told[1]
        place = self._frames.get(frame)
        if place is None:
            place = self._frames[frame] = len(self.frames)
            self.frames.append([frame.file, frame.line, frame.function])
        self._told_frames[id(frame)] = frame, place
        return place

    def guard(self, guard: Guard) -> Row:
        """A guard, of a kind that says the same in every process."""
        source = -1 if guard.source is None else self.source(guard.source)
        return [source, _KIND_PLACES[guard.kind], self._payload(guard), self.stack(guard.user_frames)]

    def _payload(self, guard: Guard) -> object:
        kind, payload = guard.kind, guard.payload
        if kind in _OF_OBJECTS:
            return self.name(payload)
        if kind in _OF_VALUES:
            if is_plain(payload):
                return payload
            if kind in _OF_KEYS and type(payload) in (tuple, frozenset):  # classes and functions are keys, too
                return type(payload)(map(self.value, payload))
            raise NotKept(f"a guard compares a {type(payload).__name__}")
        if kind in _OF_SOURCES:
            return self.source(payload)
        match kind, payload:
            case GuardKind.ALL_DISTINCT, tuple():
                return list(map(self.source, payload))
            case GuardKind.DISTINCT_STORAGE, WrittenMemory(written=written, others=others):
                return [list(map(self.source, written)), list(map(self.source, others))]
            case GuardKind.TENSOR, TensorGuard():
                return [self.name(payload.type), *(getattr(payload, name) for name in _TENSOR_FIELDS)]
            case GuardKind.SHAPE, ShapeProgram(program=program, symbols=symbols, text=text):
                return [program, [[name, self.source(source)] for name, source in symbols.items()], text]
            case GuardKind.GLOBAL_STATE, GlobalState():
                return payload
            case GuardKind.AMBIENT, AmbientRead(function=function, args=args, value=value):
                return [self.name(function), [self.value(arg) for arg in args], self.value(value)]
        raise NotKept(f"a guard of the kind {kind.value}")


def _fields_behind_base(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.name != "base")


class Reader:
    """What `Writer` wrote, around the objects of this process."""

    def __init__(
        self, frames: Sequence[Row], stacks: Sequence[Row], objects: Sequence[object], pins: Sequence[int]
    ) -> None:
        self.objects = objects
        self.pins = pins
        self.sources: list[Source] = []
        places = [UserFrame(*row) for row in frames]
        self._stacks: list[tuple[UserFrame, ...]] = []
        for outer, frame in stacks:
            self._stacks.append((*self.stack(outer), places[frame]))

    def value(self, value: object) -> object:
        """A plain value, or the object of a name."""
        return self.objects[value.place] if type(value) is Named else value

    def add_source(self, row: Row) -> None:
        """The next source of the table."""
        kind: Any = _SOURCES[row[0]]
        if kind in _ROOTS:
            self.sources.append(kind(*row[1:]))
            return
        base, *fields = row[1:]
        if kind is Item:
            key, pin, own = fields
            key = self.value(key) if pin is None else self.objects[self.pins[pin]]
            fields = [key, pin, own]
        elif kind is Reading:
            fields[0] = self.value(fields[0])
        self.sources.append(kind(self.sources[base], *fields))

    def stack(self, place: int) -> tuple[UserFrame, ...]:
        """The user's frames at a place."""
        return self._stacks[place] if place >= 0 else ()

    def guard(self, row: Row) -> Guard:
        """A guard around this process's objects."""
        source, code, payload, stack = row
        kind = _KINDS[code]
        if kind in _OF_OBJECTS:
            payload = self.objects[payload]
        elif kind in _OF_SOURCES:
            payload = self.sources[payload]
        elif kind in _BUILT:
            payload = _BUILT[kind](self, payload)
        return Guard(self.sources[source] if source >= 0 else None, kind, payload, self.stack(stack))

    def _these(self, places: Sequence[int]) -> tuple[Source, ...]:
        return tuple(self.sources[place] for place in places)


_ROOTS = frozenset({Argument, Global, ClosureCell, Pinned})
_BUILT: Mapping[GuardKind, Callable[[Reader, Any], object]] = types.MappingProxyType(
    {
        **dict.fromkeys(_OF_KEYS, lambda reader, held: type(held)(map(reader.value, held))),
        GuardKind.ALL_DISTINCT: lambda reader, held: reader._these(held),
        GuardKind.DISTINCT_STORAGE: lambda reader, held: WrittenMemory(*map(reader._these, held)),
        GuardKind.SHAPE: lambda reader, held: ShapeProgram(
            held[0], {name: reader.sources[place] for name, place in held[1]}, held[2]
        ),
        GuardKind.TENSOR: lambda reader, held: TensorGuard(reader.objects[held[0]], *held[1:]),
        GuardKind.AMBIENT: lambda reader, held: AmbientRead(
            reader.objects[held[0]], tuple(map(reader.value, held[1])), reader.value(held[2])
        ),
    }
)
