"""Where a value came from: a path from the call's arguments, globals or closure to an object.

A source is a frozen record. `expression()` prints it as Python over the names that the generated
code has in scope (`args`, `G` for the function's globals, `C` for its closure cells), and the C++
guard tree walks the same records, so that guards and generated code read the same object.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, Union, dataclass_transform


class _Step:
    """What every source has: its text, and room for that and for its hash."""

    __slots__ = ("_hash", "_text")
    _hash: int
    _text: str

    def expression(self) -> str:
        """The text by which generated code and guards read it: P, G and C are what code holds, globals and cells."""
        raise NotImplementedError


S = TypeVar("S", bound=_Step)


@dataclass_transform(frozen_default=True)
def _source(cls: type[S]) -> type[S]:
    """A record, frozen to the type checker, whose hash and text are made once: a path is twice as long as the modules
    are deep, and each read of the program asks for the hash of one."""
    made = dataclass(slots=True, unsafe_hash="__hash__" not in vars(cls))(cls)
    compute, write = made.__hash__, made.expression

    def hashed(self: S) -> int:
        try:
            return self._hash
        except AttributeError:
            found = self._hash = compute(self)
            return found

    def expression(self: S) -> str:
        try:
            return self._text
        except AttributeError:
            found = self._text = write(self)
            return found

    type.__setattr__(made, "__hash__", hashed)
    type.__setattr__(made, "expression", wraps(write)(expression))
    return made


@_source
class Argument(_Step):
    """Slot `index` of the flat argument vector (positional, keyword-only, *args tuple, **kwargs dict)."""

    index: int
    name: str

    def expression(self) -> str:
        return self.name


@_source
class Global(_Step):
    """`globals()[name]` of the captured function; `module` names another module's globals."""

    name: str
    module: str | None = None

    def expression(self) -> str:
        return f"G[{self.name!r}]" if self.module is None else f"sys.modules[{self.module!r}].__dict__[{self.name!r}]"


@_source
class ClosureCell(_Step):
    """Contents of closure cell `index` of the captured function."""

    index: int
    name: str

    def expression(self) -> str:
        return f"C[{self.index}].cell_contents"


@_source
class Pinned(_Step):
    """An object that the compiled code holds by reference: a class, a function, a module object, a cell."""

    key: int
    label: str

    def expression(self) -> str:
        return f"P[{self.key}]"


@_source
class Attribute(_Step):
    """`getattr(base, name)` by the full attribute protocol; `native`: on a C type, so that no Python code runs."""

    base: Source
    name: str
    native: bool = False

    def expression(self) -> str:
        return f"{self.base.expression()}.{self.name}"


@_source
class InstanceAttribute(_Step):
    """`base.__dict__[name]` of an instance or a class: no other class, descriptor or `__getattr__` is asked."""

    base: Source
    name: str

    def expression(self) -> str:
        return f"{InstanceDict(self.base).expression()}[{self.name!r}]"


@_source
class CellContents(_Step):
    """What the closure cell `base` holds."""

    base: Source

    def expression(self) -> str:
        return f"{self.base.expression()}.cell_contents"


@_source
class InstanceDict(_Step):
    """The instance's dictionary itself, whatever the class says about `__dict__` or `__getattribute__`."""

    base: Source

    def expression(self) -> str:
        return f"object.__getattribute__({self.base.expression()}, '__dict__')"


@_source
class Item(_Step):
    """`base[key]` of a list, tuple or dict (or a subclass), by the built-in class's lookup.

    Keys are compared by value where that runs none of the program's code, else by identity. `pin` is the place among
    the pinned objects of a key that cannot be written as a literal. `own` names the built-in class where the class of
    the container has a lookup of its own.
    """

    base: Source
    key: object
    pin: int | None = None
    own: str = ""

    def __eq__(self, other: object) -> bool:
        if type(other) is not Item or self.base != other.base:
            return False
        return self.key is other.key or _same_key(self.key, other.key)

    def __hash__(self) -> int:
        return hash((self.base, self.key if _is_plain(self.key) else id(self.key)))

    def expression(self) -> str:
        base, key = self.base.expression(), repr(self.key) if self.pin is None else f"P[{self.pin}]"
        return f"{self.own}.__getitem__({base}, {key})" if self.own else f"{base}[{key}]"


_PLAIN_KEYS = frozenset({int, str, bool, float, bytes, type(None)})


def _is_plain(key: object) -> bool:
    return type(key) in _PLAIN_KEYS or (type(key) is tuple and all(map(_is_plain, key)))


def _same_key(a: object, b: object) -> bool:
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_same_key, a, b))
    return type(a) is type(b) and type(a) in _PLAIN_KEYS and a == b


@_source
class DictKeyAt(_Step):
    """The `index`-th key of a dict, for keys that are not constants."""

    base: Source
    index: int

    def expression(self) -> str:
        return f"list({self.base.expression()})[{self.index}]"


@_source
class TypeOf(_Step):
    """`type(base)`."""

    base: Source

    def expression(self) -> str:
        return f"type({self.base.expression()})"


@_source
class Referent(_Step):
    """What the weak reference `base` refers to (None once it is dead)."""

    base: Source

    def expression(self) -> str:
        return f"{self.base.expression()}()"


@_source
class Reading(_Step):
    """What a function gives for the object at `base`: the tensor that has the memory of a NumPy array (None where there
    is none), the number of a random generator."""

    base: Source
    read: Callable[[Any], Any]
    name: str = ""  # by which compiled code holds the function

    def expression(self) -> str:
        name = self.name or getattr(self.read, "__name__", "tensor_at")
        return f"{name}({self.base.expression()})"


@_source
class TensorSize(_Step):
    """`base.shape[dim]` (int64)."""

    base: Source
    dim: int

    def expression(self) -> str:
        return f"{self.base.expression()}.shape[{self.dim}]"


@_source
class TensorStride(_Step):
    """`base.stride(dim)` in elements."""

    base: Source
    dim: int

    def expression(self) -> str:
        return f"{self.base.expression()}.stride({self.dim})"


@_source
class TensorOffset(_Step):
    """`base.storage_offset()` in elements."""

    base: Source

    def expression(self) -> str:
        return f"{self.base.expression()}.storage_offset()"


@_source
class Computed(_Step):
    """A number that generated code computes from others: it is read nowhere, and no guard speaks of it."""

    text: str

    def expression(self) -> str:
        return self.text


Source = Union[
    Argument, Global, ClosureCell, Pinned, Attribute, InstanceAttribute, CellContents, InstanceDict, Item, DictKeyAt,
    TypeOf, Referent, Reading, TensorSize, TensorStride, TensorOffset,
]  # fmt: skip


def is_source(value: object) -> bool:
    """Whether a value is one of the above."""
    return isinstance(value, _Step)


def base_of(source: Source) -> Source | None:
    """The source that this one is reached through, or None for a root."""
    return getattr(source, "base", None)


_REGISTRY_NAMES = frozenset({"_parameters", "_buffers", "_modules", "__dict__"})
_GRAPHS_OWN = "self"
"""The first parameter of a graph module's forward."""


def input_name(source: Source) -> str:
    """A placeholder's name: the path to the value, without the registries on the way."""
    parts: list[str] = []
    step: Source | None = source
    while step is not None:
        part = getattr(step, "name", None) or getattr(step, "label", None)
        if part is None:
            part = getattr(step, "key", None)
        if part is not None and part not in _REGISTRY_NAMES:
            parts.append(str(part))
        step = base_of(step)
    text = "_".join(reversed(parts)).lower()
    text = "".join(c if c.isalnum() else "_" for c in text).strip("_")
    return text if text and not text[0].isdigit() and text != _GRAPHS_OWN else f"input_{text}"


def is_beneath(source: Source, other: Source) -> bool:
    """Whether `source` is `other` or reached through it."""
    step: Source | None = source
    while step is not None:
        if step == other:
            return True
        step = base_of(step)
    return False


@dataclass(frozen=True, slots=True)
class Scope:
    """What sources are resolved against: one call of the captured function."""

    flat: Sequence[object]
    globals: Mapping[str, object]
    closure: tuple[types.CellType, ...]
    pinned: Sequence[object]
    modules: Mapping[str, types.ModuleType]

    @staticmethod
    def of(function: types.FunctionType, flat: Sequence[object], pinned: Sequence[object]) -> Scope:
        """That of a call of the function with the flat argument vector."""
        return Scope(flat, function.__globals__, function.__closure__ or (), pinned, sys.modules)


def resolve(source: Source, scope: Scope) -> Any:
    """The object at `source` in `scope`. Raises what the failing step raises."""
    match source:
        case Argument(index=index):
            return scope.flat[index]
        case Global(name=name, module=None):
            return scope.globals[name]
        case Global(name=name, module=module):
            return scope.modules[str(module)].__dict__[name]
        case ClosureCell(index=index):
            return scope.closure[index].cell_contents
        case Pinned(key=key):
            return scope.pinned[key]
        case Attribute(base=base, name=name):
            return getattr(resolve(base, scope), name)
        case InstanceAttribute(base=base, name=name):
            return instance_dict(resolve(base, scope))[name]
        case CellContents(base=base):
            return resolve(base, scope).cell_contents
        case InstanceDict(base=base):
            return instance_dict(resolve(base, scope))
        case Item(base=base, key=key):
            return base_item(resolve(base, scope), key)
        case DictKeyAt(base=base, index=index):
            return own_keys(resolve(base, scope))[index]
        case TypeOf(base=base):
            return type(resolve(base, scope))
        case Referent(base=base):
            return resolve(base, scope)()
        case Reading(base=base, read=read):
            return read(resolve(base, scope))
        case TensorSize(base=base, dim=dim):
            return resolve(base, scope).shape[dim]
        case TensorStride(base=base, dim=dim):
            return resolve(base, scope).stride(dim)
        case TensorOffset(base=base):
            return resolve(base, scope).storage_offset()
    raise TypeError(f"not a source: {source!r}")


def instance_dict(obj: object) -> Mapping[str, object]:
    """`obj.__dict__` by the type's own slot, whatever the class says about `__getattribute__`."""
    return object.__getattribute__(obj, "__dict__")  # type: ignore[no-any-return]


def own_dict(obj: object) -> dict[str, object] | None:
    """What `instance_dict` gives, or None for an object without one."""
    try:
        return object.__getattribute__(obj, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return None


def own_keys(container: dict[object, object]) -> tuple[object, ...]:
    """The keys in their order, by the built-in class: an OrderedDict keeps an order of its own."""
    return tuple((OrderedDict if isinstance(container, OrderedDict) else dict).keys(container))


def own_length(container: Any) -> int:
    """How many items it holds, by the built-in class: a `__len__` of the program's own may say anything."""
    kind = next((base for base in CONTAINERS if isinstance(container, base)), None)
    return len(container) if kind is None else kind.__len__(container)


def own_items(container: object) -> Iterator[Any]:
    """The items of a list, tuple, set, frozenset or deque, the keys of a dict, by the built-in class."""
    return next(base for base in _ITERATED if isinstance(container, base)).__iter__(container)  # type: ignore[no-any-return]


CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset)
_ITERATED: tuple[Any, ...] = (*CONTAINERS, deque)


def table_shown(view: object) -> object:
    """The mapping that a mapping proxy, or a view of a dict, shows: the one object that it holds."""
    (table,) = gc.get_referents(view)
    return table


def base_item(container: Any, key: object) -> object:
    """An item by the lookup of the built-in base class: a `defaultdict` gets no item by being asked."""
    if isinstance(container, dict):
        item = dict.get(container, key, container)
        if item is container and not dict.__contains__(container, key):
            raise KeyError(key)
        return item
    lookup: Any = next((base.__getitem__ for base in (list, tuple) if isinstance(container, base)), None)
    return container[key] if lookup is None else lookup(container, key)
