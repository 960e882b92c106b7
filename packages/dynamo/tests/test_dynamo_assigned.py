"""Whatever can be assigned to on an object that stays the same object is guarded where compiled code reads it.

The attributes are found by trying: each name in `dir()` of an object of each kind, and those that a kind keeps in a
`__dict__`, is assigned to; where Python lets it, a program that reads it is called, it is assigned to, and the program is
called again, beside eager.
"""

from __future__ import annotations

import collections
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdynamo

_MISSING = object()
# An assignment of `__class__` makes it another kind of object; hooks of attributes are read by the interpreter itself;
# and what Python asks of classes alone is nobody's on an instance.
_OUT = {
    "__class__", "__dict__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__builtins__", "__new__",
    "__init_subclass__", "__subclasshook__", "__class_getitem__",
}  # fmt: skip


def _function() -> object:
    def scaled(value: float = 1.0, *, by: float = 2.0) -> float:
        """Words."""
        return value * by

    scaled.amount = 2.0  # type: ignore[attr-defined]
    scaled.names = ["a"]  # type: ignore[attr-defined]
    scaled.helper = torch.sin  # type: ignore[attr-defined]
    return scaled


def _class() -> type:
    class Kind:
        """Words."""

        a: int = 1

        def run(self, x: object) -> object:
            return x

    return Kind


def _with(obj: Any, **attributes: object) -> Any:
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


class _Dict(dict[str, int]):
    pass


HELD: dict[str, Any] = {"amount": 2.0, "text": "a", "names": ["a"], "helper": torch.sin}
OBJECTS: dict[str, Callable[[], Any]] = {
    "function": _function,
    "function that wraps": lambda: functools.wraps(_function())(lambda x: x),  # type: ignore[arg-type]
    "class": _class,
    "class of an instance": lambda: type(_class()()),
    "class with a metaclass": lambda: type("Meta", (type,), {})("Made", (), {"a": 1}),
    "cached function": lambda: _with(functools.lru_cache(lambda v: v), **HELD),
    "partial": lambda: _with(functools.partial(max, 1), **HELD),
    "namespace": lambda: types.SimpleNamespace(**HELD),
    "thread's own": lambda: _with(threading.local(), **HELD),
    "dict with a default": lambda: collections.defaultdict(list, a=[1]),
    "dict with attributes": lambda: _with(_Dict(a=1), **HELD),
    "exception": lambda: _with(ValueError("a"), **HELD),
    "instance": lambda: _with(_class()(), **HELD),
    "module": lambda: _with(types.ModuleType("made"), **HELD),
    "parameter": lambda: _with(torch.nn.Parameter(torch.ones(2)), amount=2.0, helper=torch.sin),
    "layer": lambda: _with(torch.nn.Linear(2, 2), **HELD),
}


def _other(value: object) -> Iterator[object]:
    """Values to assign in the place of one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield value + 3
    elif isinstance(value, str):
        yield value + " and more"
    elif isinstance(value, types.CodeType):
        yield (lambda value=1, *, by=2: value).__code__
    elif isinstance(value, (dict, list, tuple)):
        yield type(value)()
    yield from ("words", torch.cos, (1, 2), {"k": 1}, None)


def _assigned(obj: Any, name: str) -> bool:
    """Assigns another value to an attribute, if Python lets one."""
    try:
        old = getattr(obj, name)
    except Exception:
        return False
    for value in _other(old):
        try:
            setattr(obj, name, value)
            changed = getattr(obj, name) is not old
        except Exception:
            continue
        if changed:
            return True
    return False


def _names(make: Callable[[], Any]) -> list[str]:
    """What can be assigned to, each tried on an object of its own."""
    obj = make()
    names = {*dir(obj), *dir(type(obj))} - _OUT
    if isinstance(obj, torch.Tensor):
        names = set(vars(obj))  # what is torch's has tests of its own
    if isinstance(obj, torch.nn.Module):
        names = {*HELD, "training"}
    return sorted(name for name in names if _assigned(make(), name))


def _same(a: object, b: object) -> bool:
    if isinstance(a, types.MethodType):
        return isinstance(b, types.MethodType) and a.__func__ is b.__func__
    return a is b or (type(a) is type(b) and bool(a == b))


@pytest.mark.parametrize("kind", OBJECTS)
def test_what_was_assigned_to_is_read_anew(kind: str) -> None:
    make = OBJECTS[kind]
    names = _names(make)
    assert names, f"nothing can be assigned to on a {kind}"
    stale = []
    for name in names:
        obj = make()

        def read(x: torch.Tensor, obj: Any = obj, name: str = name) -> tuple[torch.Tensor, object]:
            return x + 1, getattr(obj, name, _MISSING)

        torchdynamo.reset()
        compiled = torchdynamo.optimize(lambda graph, examples: graph.forward)(read)
        x = torch.ones(2)
        for when in ("at first", "behind an assignment"):
            if not _same(read(x)[1], compiled(x)[1]):
                stale.append(f"{name} {when}")
            _assigned(obj, name)
    assert not stale, f"of a {kind}: {stale}"
