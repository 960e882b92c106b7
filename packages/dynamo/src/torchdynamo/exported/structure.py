"""The containers of a call's arguments and of its results: what is in them is a list of leaves.

Containers are those that `torch.utils._pytree` knows: tuples, lists, dicts, named tuples, and the dataclasses that the
program has registered there. In a file a structure is text, and a class is looked up by its name among classes that the
reader has registered or names: reading imports nothing.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from torchdynamo.errors import NotExportable, UnsafeArchive


class Structure:
    """How leaves are put together."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.spec == other.spec

    __hash__ = None  # type: ignore[assignment]

    def build(self, leaves: Iterable[object]) -> Any:
        """Containers of this structure around the leaves."""
        return pytree.tree_unflatten(list(leaves), self.spec)

    @property
    def size(self) -> int:
        """How many leaves there are."""
        return self.spec.num_leaves

    def text(self) -> str:
        """For a person."""
        return str(self.build(_Place(index) for index in range(self.size)))

    def encode(self) -> Any:
        """As JSON has it."""
        return _encode(self.build(_Place(index) for index in range(self.size)))

    @staticmethod
    def decode(text: object, classes: Sequence[type]) -> Structure:
        """The structure that `encode` wrote. `classes` are those of containers that are not torch's own."""
        return flatten(_decode(text, {_name(c): c for c in (*pytree.SUPPORTED_NODES, *classes)}))[1]


class _Place:
    """Stands for a leaf."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return "*"


def flatten(value: object) -> tuple[list[Any], Structure]:
    """The leaves of a value, and how they are put together."""
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            raise NotExportable(
                f"a {type(leaf).__qualname__} is no container yet whose fields could be inputs or results: "
                f"call torch.utils._pytree.register_dataclass({type(leaf).__qualname__}) first"
            )
    return leaves, Structure(spec)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _encode(value: Any) -> object:
    kind = type(value)
    if kind is _Place:
        return value.index
    if kind is list:
        return [_encode(item) for item in value]
    if kind is tuple:
        return {"tuple": [_encode(item) for item in value]}
    if kind in (dict, OrderedDict):
        if not all(type(key) in (str, int, bool) for key in value):
            raise NotExportable("a dict whose keys are no texts or integers has no form in a file")
        return {kind.__name__: [[key, _encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"named": _name(kind), "fields": [[f, _encode(getattr(value, f))] for f in kind._fields]}
    if dataclasses.is_dataclass(value):
        named = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
        return {"named": _name(kind), "fields": [[name, _encode(item)] for name, item in named]}
    if value is None:  # a field of a dataclass that is not there
        return None
    raise NotExportable(f"a container of type {_name(kind)} has no form in a file")


def _decode(text: Any, classes: Mapping[str, type]) -> object:
    if text is None:
        return None
    if type(text) is int:
        return _Place(text)
    if isinstance(text, list):
        return [_decode(item, classes) for item in text]
    if "tuple" in text:
        return tuple(_decode(item, classes) for item in text["tuple"])
    for kind in (dict, OrderedDict):
        if kind.__name__ in text:
            return kind((key, _decode(item, classes)) for key, item in text[kind.__name__])
    if "named" not in text:
        raise UnsafeArchive(f"no container: {text!r}")
    found = classes.get(text["named"])
    if found is None or not (dataclasses.is_dataclass(found) or hasattr(found, "_fields")):
        raise UnsafeArchive(
            f"the file holds a {text['named']}: register that dataclass with torch.utils._pytree.register_dataclass, "
            "or pass the named tuple's class as load(..., classes=...)"
        )
    return found(**{name: _decode(item, classes) for name, item in text["fields"]})
