"""Objects that a frame holds, by where another process finds its own.

A name is a row: a way to the object from modules, the captured function or a source, each step by what Python itself
stores and no code of the program's. Beside it stands the digest of what the object is (`Contents`).
"""

from __future__ import annotations

import builtins
import enum
import functools
import logging
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from torchdynamo.kept.contents import Contents, NotKept, nested_codes
from torchdynamo.kept.rows import Row, is_plain
from torchdynamo.schemas import Guard, GuardKind
from torchdynamo.sources import Pinned, Source, TypeOf, base_of

# What holds functions, by the attributes at which they are.
_PARTS = ("__func__", "fget", "fset", "fdel", "func", "__wrapped__", "_torchdynamo_inline")


class Special(Protocol):
    """Names of objects that capture itself has made."""

    def row(self, obj: object, namer: Namer) -> Row | None:
        """The row of such an object; None for any other."""

    def found(self, row: Row, finder: Finder) -> object:
        """This process's object of a row. Raises NotKept where there is none."""


class Namer:
    """Finds names for objects; the table grows by whatever a name leads through.

    Args:
        function: the captured function.
        guards: what they read of the live world may be a way to an object.
        reached: sources at which capture came upon an object, by its identity.
        source: gives the place of a source in its table.
    """

    def __init__(
        self,
        function: types.FunctionType,
        guards: Sequence[Guard],
        reached: Callable[[object], Sequence[Source]],
        pinned: Sequence[object],
        contents: Contents,
        special: Special,
    ) -> None:
        self.rows: list[Row] = []
        self.digests: list[str] = []
        self.source: Callable[[Source], int]  # of the tables that are written beside these
        self._function = function
        self._reached = reached
        self._pinned = pinned
        self._contents = contents
        self._special = special
        self._places: dict[int, int] = {}
        self._alive: list[object] = []
        self._open: set[int] = set()
        self._at: dict[int, list[Source]] = {}
        for guard in guards:
            if guard.source is None:
                continue
            if guard.kind is GuardKind.IDENTITY:
                self._at.setdefault(id(guard.payload), []).append(guard.source)
            elif guard.kind is GuardKind.TYPE:
                self._at.setdefault(id(guard.payload), []).append(TypeOf(guard.source))
        self._cells: dict[int, tuple[types.FunctionType, int]] = {}
        self._codes: dict[int, tuple[types.FunctionType, tuple[int, ...]]] = {}
        self._seen: set[int] = set()
        self._classes: dict[type, None] = {}  # whose functions are not known yet
        self._heirs: dict[type, type] = {}  # of each class one that inherits from it
        self._bodies: dict[int, tuple[type, str, str | None]] = {}  # classes and names in them, parts of what is there
        for held in (function, *pinned, *(guard.payload for guard in guards)):
            self._know(held)
            if isinstance(held, type):
                self._classes.update(dict.fromkeys(held.__mro__))
                self._heirs.update((kind, held) for kind in held.__mro__[1:] if kind not in self._heirs)

    def _know(self, held: object) -> None:
        """A function's cells and code, and those of functions behind it."""
        if type(held) is not types.FunctionType or id(held) in self._seen:
            return
        todo: list[object] = [held]
        while todo:
            one = todo.pop()
            if not isinstance(one, types.FunctionType) or id(one) in self._seen:
                continue
            self._seen.add(id(one))
            for place, cell in enumerate(one.__closure__ or ()):
                self._cells.setdefault(id(cell), (one, place))
                if cell != _EMPTY:
                    todo.append(cell.cell_contents)
            for way, code in nested_codes(one.__code__):
                self._codes.setdefault(id(code), (one, way))

    def place(self, obj: object) -> int:
        """The place of an object in the table.

        Raises:
            NotKept: there is no way to it, or no telling what it is.
        """
        place = self._places.get(id(obj))
        if place is not None:
            return place
        if id(obj) in self._open:
            raise NotKept(f"the way to {_shown(obj)} leads through itself")
        self._open.add(id(obj))
        try:
            row = self._row(obj)
        finally:
            self._open.discard(id(obj))
        return self._put(obj, row, "" if row[0] in _WITHOUT_CONTENT else self._contents.of(obj))

    def _put(self, obj: object, row: Row, digest: str) -> int:
        place = self._places[id(obj)] = len(self.rows)
        self.rows.append(row)
        self.digests.append(digest)
        self._alive.append(obj)
        return place

    def code(self, code: types.CodeType, module: str | None = None) -> Row:
        """[a function's place, way among its constants] of code that is its or within it.

        Args:
            module: where it is written, if that is known.
        """
        if id(code) not in self._codes and module is not None:
            self._look_for(module, code.co_qualname.partition(".<locals>")[0])
        if id(code) not in self._codes:
            self._look_into_classes()
        known = self._codes.get(id(code))
        if known is None:
            raise NotKept(f"the code of {code.co_qualname} belongs to no function that is known")
        return [self.place(known[0]), list(known[1])]

    def _look_into_classes(self) -> None:
        """Learns the functions in the bodies of the classes that capture met. It comes upon some without a guard: the
        class's digest says what they are; and methods that were made by text have code of other names."""
        while self._classes:
            kind = self._classes.popitem()[0]
            for name, held in vars(kind).items():
                self._know(held)
                if isinstance(held, (types.FunctionType, functools._lru_cache_wrapper, *_HOLDERS)):
                    self._bodies.setdefault(id(held), (kind, name, None))
                    for part in _PARTS:
                        self._know(inner := _own(held, part))
                        self._bodies.setdefault(id(inner), (kind, name, part))

    def _look_for(self, module: str, qualname: str) -> None:
        """Learns the code of what goes by a qualified name."""
        owner: object = sys.modules.get(module)
        for step in qualname.split("."):
            if not isinstance(owner, (types.ModuleType, type)) or step not in vars(owner):
                return
            owner = vars(owner)[step]
        for _ in range(_MOST_DECORATORS):
            for held in (owner, *(_own(owner, part) for part in _PARTS)):
                self._know(held)
            owner = _own(owner, "__wrapped__")

    # -- ways -------------------------------------------------------------------------------

    def _row(self, obj: Any) -> Row:
        if obj is self._function:
            return ["root"]
        if obj is sys.modules:
            return ["modules"]
        special = self._special.row(obj, self)
        if special is not None:
            return special
        if is_plain(obj) and id(obj) not in self._at:  # else it is to be the very object
            return ["value", obj]
        for way in (self._of_module, self._member, self._part, self._read, self._of_class):
            try:
                row = way(obj)
            except NotKept:
                continue
            if row is not None:
                return row
        raise NotKept(f"there is no way to {_shown(obj)}")

    def _of_module(self, obj: Any) -> Row | None:
        """A module, what is in it, the class of one that is more than a plain module."""
        if isinstance(obj, types.ModuleType):
            return ["module", obj.__name__] if sys.modules.get(obj.__name__) is obj else None
        if isinstance(obj, type) and issubclass(obj, types.ModuleType):
            module = sys.modules.get(obj.__module__)
            return ["class", self.place(module)] if module is not None and type(module) is obj else None
        name = module_of(obj) if type(obj) is dict else None
        return None if name is None else ["part", self.place(sys.modules[name]), "__dict__"]

    def _member(self, obj: Any) -> Row | None:
        """A class, or a function of one or of a module, by its qualified name, also behind what holds it there."""
        if not isinstance(obj, _WITH_NAMES):
            return None
        name, qualname = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
        if isinstance(obj, type) and _OF_PYTHON.get(obj.__qualname__) is obj:
            return ["python", obj.__qualname__]
        if type(name) is not str or type(qualname) is not str:
            return None
        owner: object = sys.modules.get(name)
        way: list[tuple[object, Row]] = []
        for step in qualname.split("."):
            if not isinstance(owner, (types.ModuleType, type)) or step not in vars(owner):
                return None
            way.append((owner, ["member", step]))
            owner = vars(owner)[step]
        holder, (kind, step) = way[-1][0], way[-1][1]
        if owner is obj:
            return [kind, self.place(holder), step]
        for _ in range(_MOST_DECORATORS):
            part = next((p for p in _PARTS if _own(owner, p) is obj), None)
            if part is not None:
                return ["part", self._held(owner, holder, step), part]
            inner = _own(owner, "__wrapped__")
            if inner is None:
                return None
            owner = inner
        return None

    def _held(self, obj: Any, holder: Any, step: str) -> int:
        """The place of what is in a class's body, which may be a descriptor."""
        known = self._places.get(id(obj))
        if known is not None or vars(holder).get(step) is not obj:
            return self.place(obj)
        row = ["member", self.place(holder), step]
        return self._put(obj, row, self._contents.of(obj))

    def _part(self, obj: Any) -> Row | None:
        """Cells and code of functions, members of enumerations, loggers."""
        if isinstance(obj, types.CellType) and id(obj) not in self._cells:
            self._look_into_classes()
        if isinstance(obj, types.CellType) and id(obj) in self._cells:
            function, place = self._cells[id(obj)]
            return ["cell", self.place(function), place]
        if isinstance(obj, types.CodeType) and id(obj) in self._codes:
            return ["code", *self.code(obj)]
        if isinstance(obj, enum.Enum) and type(obj).__members__.get(obj.name) is obj:
            return ["enum", self.place(type(obj)), obj.name]
        if isinstance(obj, logging.Logger) and logging.Logger.manager.loggerDict.get(obj.name) is obj:
            return ["logger", obj.name]
        return None

    def _read(self, obj: Any) -> Row | None:
        """At a source where guards, or capture, came upon it; behind a cell."""
        for source in (*self._at.get(id(obj), ()), *self._reached(obj)):
            root: Source = source
            while (base := base_of(root)) is not None:
                root = base
            if isinstance(root, Pinned) and (id(self._pinned[root.key]) in self._open):
                continue
            try:
                return ["at", self.source(source)]
            except NotKept:
                continue
        for cell_id, (function, place) in self._cells.items():
            cell = (function.__closure__ or ())[place]
            if id(cell) == cell_id and cell != _EMPTY and cell.cell_contents is obj and id(function) not in self._open:
                return ["contents", self.place(cell)]
        return None

    def _of_class(self, obj: object) -> Row | None:
        """Where no name leads to a class (one that is made while the program runs, or whose module is another object):
        what others inherit from, and functions by the bodies that they are in."""
        if isinstance(obj, type):
            heir = self._heirs.get(obj)
            return None if heir is None else ["base", self.place(heir), heir.__mro__.index(obj)]
        self._look_into_classes()
        if obj is None or id(obj) not in self._bodies:
            return None
        kind, name, part = self._bodies[id(obj)]
        if part is None:
            return ["member", self.place(kind), name]
        return ["part", self._held(vars(kind)[name], kind, name), part]


def module_of(namespace: Mapping[str, Any]) -> str | None:
    """The name under which the module of a namespace is found: its own, or that which it was imported by."""
    names = (namespace.get("__name__"), getattr(namespace.get("__spec__"), "name", None))
    return next((name for name in names if _namespace(name) is namespace), None)


def _namespace(name: object) -> object:
    module = sys.modules.get(name) if type(name) is str else None
    return None if module is None else getattr(module, "__dict__", None)


def _own(obj: object, name: str) -> object:
    """A part of a function or a descriptor, by what Python stores."""
    if name in _ATTRIBUTES:
        return vars(obj).get(name) if isinstance(obj, _ATTRIBUTES[name]) else None
    return getattr(obj, name, None) if isinstance(obj, _HOLDERS) else None


def _shown(obj: object) -> str:
    return f"{getattr(obj, '__qualname__', '')} ({type(obj).__qualname__})"


class Finder:
    """The objects of this process by the names that another one gave.

    Args:
        function: the function that is called.
        at: what is found at a place of the table of sources now.
    """

    def __init__(
        self, function: types.FunctionType, at: Callable[[int], object], contents: Contents, special: Special
    ) -> None:
        self.objects: list[Any] = []
        self._function = function
        self._at = at
        self._contents = contents
        self._special = special
        self._known: set[int] = set()

    def add(self, row: Row, digest: str) -> None:
        """Finds the next object of the table.

        Raises:
            NotKept: it is another one than it was there.
            Exception: a step of the way is not there.
        """
        kind, *held = row
        found = _FOUND[kind](self, *held) if kind in _FOUND else self._special.found(row, self)
        if digest and self._contents.of(found) != digest:
            raise NotKept(f"{_shown(found)} is another one")
        if kind != "value":
            if id(found) in self._known:
                raise NotKept(f"{_shown(found)} goes by two names")
            self._known.add(id(found))
        self.objects.append(found)

    def code(self, place: int, way: Sequence[int]) -> types.CodeType:
        """Code of a function, or within it."""
        code: types.CodeType = self.objects[place].__code__
        for step in way:
            code = code.co_consts[step]
        if not isinstance(code, types.CodeType):
            raise NotKept("no code where there was some")
        return code


def _stored(owner: object, name: str) -> object:
    if not isinstance(owner, (types.ModuleType, type)):
        raise NotKept(f"{name} of what is no module or class")
    return vars(owner)[name]


def _part_of(owner: object, name: str) -> object:
    if name == "__dict__" and isinstance(owner, types.ModuleType):
        return vars(owner)
    found = _own(owner, name) if name in _PARTS else None
    if found is None:
        raise NotKept(f"no {name} where there was one")
    return found


def _logger(name: str) -> object:
    return logging.Logger.manager.loggerDict[name]


_FOUND: Mapping[str, Callable[..., object]] = types.MappingProxyType(
    {
        "root": lambda finder: finder._function,
        "modules": lambda finder: sys.modules,
        "value": lambda finder, value: value,
        "module": lambda finder, name: sys.modules[name],
        "member": lambda finder, owner, name: _stored(finder.objects[owner], name),
        "python": lambda finder, name: _OF_PYTHON[name],
        "class": lambda finder, module: type(finder.objects[module]),
        "base": lambda finder, heir, place: finder.objects[heir].__mro__[place],
        "part": lambda finder, owner, name: _part_of(finder.objects[owner], name),
        "cell": lambda finder, owner, place: finder.objects[owner].__closure__[place],
        "contents": lambda finder, cell: finder.objects[cell].cell_contents,
        "code": lambda finder, owner, way: finder.code(owner, way),
        "enum": lambda finder, owner, name: finder.objects[owner].__members__[name],
        "logger": lambda finder, name: _logger(name),
        "at": lambda finder, place: finder._at(place),
    }
)
# Those that stand in an object's dict: of a scripted function the one that was scripted.
_ATTRIBUTES: Mapping[str, tuple[type, ...]] = types.MappingProxyType(
    {
        "__wrapped__": (types.FunctionType, functools._lru_cache_wrapper),
        "_torchdynamo_inline": (torch._C.ScriptFunction,),
    }
)
_WITHOUT_CONTENT = frozenset({"value", "logger", "modules", "hook", "hooked", "world", "own", "continuation"})
_MOST_DECORATORS = 20
_EMPTY = types.CellType()
# Python's own classes that are in no module by their names.
_OF_PYTHON: Mapping[str, type] = types.MappingProxyType(
    {
        kind.__qualname__: kind
        for kind in (
            *(held for held in vars(types).values() if isinstance(held, type)),
            *map(type, map(iter, (range(0), range(1 << 70), [], (), "", b"", {}, {}.values(), {}.items(), set()))),
            *map(type, ({}.keys(), {}.values(), {}.items(), reversed([]), reversed({}), iter(int, 1))),
        )
        if kind.__module__ == "builtins" and not hasattr(builtins, kind.__qualname__)
    }
)
_WITH_NAMES = (
    type, types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper, type(typing.Optional),
)  # fmt: skip
_HOLDERS = (property, staticmethod, classmethod, functools.cached_property)  # noqa: TID251 - the program's
