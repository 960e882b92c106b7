"""Every way to write to an object of the outside: what it holds then, what the program reads of it, and that no stand-in
of capture is left in it. Where a place has several names (an attribute, a slot, an item of `__dict__`, a method of a
class in C), it is one place by all of them."""

from __future__ import annotations

import collections
import copy
import functools
import heapq
import itertools
import operator
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import torchdynamo

Program = Callable[[torch.Tensor, Any], Any]


class Meta(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)


class Plain(metaclass=Meta):
    shared: Any = 0

    def __init__(self, value: Any = 1) -> None:
        self.value, self.items, self.table = value, [], {}


class Slots:
    __slots__ = ("other", "value")

    def __init__(self, value: Any = 1) -> None:
        self.value = value


class BehindSlots(Slots):
    """With a `__dict__` beside the slots that it inherits."""


class BothSlots(Slots):
    __slots__ = ("__dict__", "own")


@dataclass(slots=True)
class Record:
    value: Any = 1
    other: Any = None


class BehindRecord(Record):
    pass


class Property:
    def __init__(self, value: Any = 1) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value

    @value.deleter
    def value(self) -> None:
        self._value = None


class BehindProperty(Property):
    @property
    def value(self) -> Any:
        return Property.value.__get__(self)

    @value.setter
    def value(self, value: Any) -> None:
        Property.value.__set__(self, value)


def module() -> types.ModuleType:
    made = types.ModuleType("written_places")
    exec("value = 1\nother = None\ndef read(): return value\ndef write(x):\n global value\n value = x\n", made.__dict__)  # noqa: S102
    sys.modules[made.__name__] = made
    return made


KINDS: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (Plain, BehindSlots, BothSlots, BehindRecord, Property, BehindProperty, module)
}


def by_name(x: torch.Tensor, o: Any) -> Any:
    o.value = x * 2
    setattr(o, "made", x + 1)  # noqa: B010
    return o.value, o.made, hasattr(o, "other")


def then_all(x: torch.Tensor, o: Any) -> Any:
    o.value = x * 2
    names = sorted(vars(o))
    o.made = 3
    return [name for name in names if not name.startswith("__")], o.value, "made" in vars(o)


def all_first(x: torch.Tensor, o: Any) -> Any:
    table = o.__dict__
    o.value = x * 2
    table["made"] = 5
    return o.value, o.made, table is o.__dict__, "value" in table


def deleted(x: torch.Tensor, o: Any) -> Any:
    o.made = x
    del o.made
    gone = hasattr(o, "made")
    o.made = x + 1
    return gone, o.made


def deleted_for_good(x: torch.Tensor, o: Any) -> Any:
    before = o.value
    o.value = x
    del o.value
    return before is not None, getattr(o, "value", None) is None


def missing(x: torch.Tensor, o: Any) -> Any:
    try:
        del o.missing
    except AttributeError:
        return x + 1
    return x


def by_object(x: torch.Tensor, o: Any) -> Any:
    object.__setattr__(o, "value", x * 3)
    o.__setattr__("made", x)
    return o.value, o.made


def by_descriptor(x: torch.Tensor, o: Any) -> Any:
    descriptor = vars(type(o)).get("value") or vars(type(o).__mro__[1]).get("value")
    if descriptor is None:
        return x
    descriptor.__set__(o, x + 5)
    found = descriptor.__get__(o), o.value
    if not isinstance(o, BehindProperty):
        descriptor.__delete__(o)
    return found, getattr(o, "value", None)


def copied(x: torch.Tensor, o: Any) -> Any:
    o.value = x * 3
    twin = copy.copy(o)
    o.value = 1
    return twin.value, type(twin).__name__


def within(x: torch.Tensor, o: Any) -> Any:
    o.write(x * 2)
    found = o.read()
    o.value = x + 1
    return found, o.read(), o.value


EVERYWHERE = [
    by_name,
    then_all,
    all_first,
    deleted,
    deleted_for_good,
    missing,
    by_object,
    by_descriptor,
    copied,
    within,
]
ON_PLAIN: dict[str, Program] = {
    "type.__setattr__": lambda x, o: (type.__setattr__(type(o), "shared", x), o.shared),
    "metaclass": lambda x, o: (setattr(type(o), "shared", x), o.shared, setattr(type(o), "fresh", x), o.fresh),
    "metaclass deletes": lambda x, o: (setattr(type(o), "gone", x), delattr(type(o), "gone"), hasattr(o, "gone")),
    "dict.__setitem__": lambda x, o: (dict.__setitem__(o.__dict__, "value", x), o.value),
    "update": lambda x, o: (o.__dict__.update(value=x, more=x), o.more),
    "ior": lambda x, o: (operator.ior(o.__dict__, {"value": x}), o.value),
    "init": lambda x, o: (o.__init__(x), o.value),
    "list.__init__": lambda x, o: (list.__init__(o.items, [x, x]), len(o.items)),
    "slice": lambda x, o: (o.items.__setitem__(slice(None), [x, x]), o.items),
    "extended": lambda x, o: (o.items.extend(x * i for i in range(2)), o.items),
    "mapped": lambda x, o: (list(map(o.items.append, [x, x])), o.items),
    "starmap": lambda x, o: (list(itertools.starmap(o.table.__setitem__, [("a", x), ("b", 2)])), o.table),
    "reduced": lambda x, o: functools.reduce(lambda a, b: (a.append(b * x), a)[1], [1, 2], o.items),
    "heap": lambda x, o: (heapq.heappush(o.items, 3), heapq.heappush(o.items, 1), heapq.heapreplace(o.items, 9), o.items),
    "queue": lambda x, o: (setattr(o, "queue", collections.deque(maxlen=1)), o.queue.append(x), o.queue),
    "deep copy": lambda x, o: (o.items.append(x), copy.deepcopy(o.items)[0].add_(1), o.items[0]),
    "swapped": lambda x, o: (o.__dict__.__setitem__("items", o.table), setattr(o, "table", x), o.items),
    "cleared": lambda x, o: (o.__dict__.clear(), setattr(o, "made", x), sorted(vars(o))),
}  # fmt: skip


def shown(value: Any, depth: int = 0) -> Any:
    """A value without identities; a stand-in of capture shows its class."""
    if depth > 5:
        return "..."
    if isinstance(value, torch.Tensor):
        return value.tolist() if type(value) is torch.Tensor else type(value).__name__
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value).__name__, *(shown(item, depth + 1) for item in value)]
    if isinstance(value, dict):
        return {key: shown(item, depth + 1) for key, item in value.items() if not str(key).startswith("__")}
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def held(o: Any) -> Any:
    names = ("value", "other", "own", "made", "_value")
    slots = {name: shown(getattr(o, name)) for name in names if hasattr(o, name)}
    return slots, shown(vars(o)), shown(dict(vars(type(o)))) if isinstance(o, Plain) else None


def observed(call: Program, make: Callable[[], Any]) -> list[Any]:
    seen = []
    for name in ("fresh", "gone"):
        if name in vars(Plain):
            delattr(Plain, name)
    Plain.shared = 0
    for _ in range(3):
        o = make()
        for number in range(2):
            try:
                result = shown(call(torch.full((2,), 1.0 + number), o))
            except Exception as error:
                result = type(error).__name__
            seen.append((result, held(o)))
    return seen


def compiled(program: Program) -> Program:
    return torchdynamo.optimize(lambda g, i: g.forward, options=torchdynamo.CaptureOptions(strict=True))(program)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", EVERYWHERE)
def test_a_write_by_any_name(program: Program, kind: str) -> None:
    if program is within and kind != "module":
        pytest.skip("of modules alone")
    if kind == "module" and program in (by_object, copied):
        pytest.skip("not of modules")
    assert observed(compiled(program), KINDS[kind]) == observed(program, KINDS[kind])


@pytest.mark.parametrize("name", ON_PLAIN)
def test_a_write_by_functions_in_c(name: str) -> None:
    assert observed(compiled(ON_PLAIN[name]), Plain) == observed(ON_PLAIN[name], Plain)
