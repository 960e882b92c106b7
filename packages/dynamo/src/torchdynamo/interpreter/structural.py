"""What C code does with containers whose parts have special methods in Python.

`[a] == [b]`, `a in items`, `table[key]`, `repr([a])` compare, hash and print the parts from inside of C. Where a part's
method is Python code the same is done here, part by part, through the world.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable
from typing import Any

from torchdynamo.interpreter.attributes import python_method
from torchdynamo.interpreter.classes import may_change
from torchdynamo.interpreter.protocol import InterpreterObject, World

_SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_PARTS: dict[type, Callable[[Any], Any]] = {
    **{kind: kind.__iter__ for kind in (*_SEQUENCES, *_SETS)},
    dict: lambda table: (part for pair in dict.items(table) for part in pair),
    collections.OrderedDict: lambda table: (part for pair in collections.OrderedDict.items(table) for part in pair),
    collections.defaultdict: lambda table: (part for pair in dict.items(table) for part in pair),
    types.SimpleNamespace: lambda namespace: vars(namespace).values(),
}
STRUCTURES: frozenset[type] = frozenset(_PARTS)
_SHOWN = ("__repr__",)


def runs_python(value: object, names: tuple[str, ...], inside: tuple[int, ...] = ()) -> bool:
    """Whether C code that asks `value`, or its parts, for one of the special methods `names` reaches Python code."""
    kind = type(value)
    parts = _PARTS.get(kind)
    if parts is not None:
        if id(value) in inside:
            return False
        inside = (*inside, id(value))
        return any(runs_python(part, names, inside) for part in parts(value))
    if not may_change(kind) or isinstance(value, (type, InterpreterObject)):
        return False
    if names is not _SHOWN and _of_torch(kind):
        return False
    if any(python_method(kind, name) is not None for name in names):
        return True
    return isinstance(value, tuple) and any(runs_python(part, names, inside) for part in tuple.__iter__(value))


def _of_torch(kind: type) -> bool:
    """Tensors and symbols, whose Python methods are a world's own business."""
    return hasattr(kind, "__torch_function__") or kind.__module__ == "torch"


# -- comparison --------------------------------------------------------------------------------

_EQUALITY = ("__eq__", "__ne__")
_ORDER = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__")


def compares_parts(symbol: str, a: object, b: object) -> bool:
    """Whether a comparison of two containers comes to a Python method of one of their parts."""
    base = _sequence_base(a)
    if symbol in ("==", "!="):
        same = (base is not None and base is _sequence_base(b)) or (isinstance(a, dict) and isinstance(b, dict))
        return same and (runs_python(a, _EQUALITY) or runs_python(b, _EQUALITY))
    return base is not None and base is _sequence_base(b) and (runs_python(a, _ORDER) or runs_python(b, _ORDER))


def _sequence_base(value: object) -> type | None:
    return next((base for base in _SEQUENCES if isinstance(value, base)), None)


def same_part(world: World, a: object, b: object) -> bool:
    """How containers compare their parts: what is identical is equal."""
    return a is b or world.truth(world.compare("==", a, b))


def compare_parts(world: World, symbol: str, a: Any, b: Any) -> bool:
    """The comparison of two sequences or two dicts."""
    if symbol in ("==", "!="):
        return _equal(world, a, b) is (symbol == "==")
    for x, y in zip(a, b, strict=False):
        if not same_part(world, x, y):
            return world.truth(world.compare(symbol, x, y))
    return world.truth(world.compare(symbol, len(a), len(b)))


def _equal(world: World, a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        for key, value in dict.items(a):
            other = stored_key(world, b, key)
            if not dict.__contains__(b, other) or not same_part(world, value, dict.__getitem__(b, other)):
                return False
        return True
    return all(same_part(world, x, y) for x, y in zip(a, b, strict=True))


def contains(world: World, container: Iterable[object], item: object) -> bool:
    """`item in container` for a sequence; the stored part is the left operand."""
    return any(part is item or world.truth(world.compare("==", part, item)) for part in container)


# -- keys --------------------------------------------------------------------------------------


def hashes_python(key: Any) -> bool:
    """Whether a key's hash is computed by Python code."""
    kind = type(key)
    if not may_change(kind):
        return kind in (tuple, frozenset) and any(map(hashes_python, key))
    if isinstance(key, (type, InterpreterObject)) or _of_torch(kind):
        return False
    if python_method(kind, "__hash__") is not None:
        return True
    return isinstance(key, tuple) and any(map(hashes_python, tuple.__iter__(key)))


def ask_hash(world: World, key: Any) -> None:
    """Computes the key's hash through the world, which then knows what it depends on."""
    if type(key) in (tuple, frozenset):
        for part in key:
            if hashes_python(part):
                ask_hash(world, part)
    elif world.call(hash, (key,), {}) != hash(key):
        world.unsupported("c_function", f"the hash of a {type(key).__qualname__} that the program has changed")


def stored_key(world: World, table: Any, key: object) -> object:
    """The key of a dict or set that `key` finds, or `key` itself where it finds none."""
    if not hashes_python(key):
        return key
    ask_hash(world, key)
    number = hash(key)
    for stored in dict.keys(table) if isinstance(table, dict) else table:
        if stored is key or (hash(stored) == number and world.truth(world.compare("==", stored, key))):
            return stored
    return key


# -- text --------------------------------------------------------------------------------------


def shows_parts(value: object) -> bool:
    """Whether the text of a container comes from a Python `__repr__` of one of its parts."""
    return type(value) in STRUCTURES and runs_python(value, _SHOWN)


def show(world: World, value: Any, inside: tuple[int, ...] = ()) -> str:
    """`repr` of a built-in container: that of a copy whose parts are their own texts."""
    kind = type(value)
    if kind not in STRUCTURES:
        return world.convert(value, "repr")
    if id(value) in inside:
        return _RECURSIVE.get(kind, "...")
    inside = (*inside, id(value))

    def text(part: object) -> _Text:
        return _Text(show(world, part, inside))

    if kind in _SETS:  # in the order of the original
        parts = ", ".join(text(part).text for part in value)
        return f"{{{parts}}}" if kind is set else f"frozenset({{{parts}}})"
    if kind is types.SimpleNamespace:
        return repr(types.SimpleNamespace(**{name: text(part) for name, part in vars(value).items()}))
    if isinstance(value, dict):
        copied = kind()
        if isinstance(copied, collections.defaultdict) and isinstance(value, collections.defaultdict):
            copied.default_factory = value.default_factory
        for key, part in kind.items(value):
            copied[text(key)] = text(part)
        return repr(copied)
    parts_of = (text(part) for part in value)
    return repr(collections.deque(parts_of, value.maxlen) if kind is collections.deque else kind(parts_of))


class _Text:
    """Prints as a text without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


_RECURSIVE: dict[type, str] = {
    list: "[...]", tuple: "(...)", dict: "{...}", collections.deque: "[...]", types.SimpleNamespace: "namespace(...)",
    collections.defaultdict: "defaultdict(...)",
}  # fmt: skip
