"""Objects of the outside, of Python's library and of C, whose data are others in each call: what a program reads of them
is read in each call, whatever it is that holds them. A row is a maker of objects by a number, and what a program reads."""

from __future__ import annotations

import argparse
import array
import builtins
import collections
import configparser
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import io
import ipaddress
import itertools
import math
import operator
import pathlib
import queue
import random
import re
import string
import struct
import threading
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import torchcompile

Make = Callable[[int], Any]
Read = Callable[[Any], Any]


class Slots:
    """With a slot."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: int) -> None:
        self.value = value


class Answers:
    """Whatever is asked, it has."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __getattr__(self, name: str) -> int:
        return self._value


class Descriptor:
    """Reads another attribute."""

    def __get__(self, obj: Any, kind: type) -> Any:
        return obj.__dict__["_value"]


class Described:
    """Has a descriptor in Python."""

    value = Descriptor()

    def __init__(self, value: int) -> None:
        self.__dict__["_value"] = value


class Number(int):
    """An int of a class of its own."""


class Text(str):
    """A text of a class of its own."""


class Extra(float):
    """A float with an attribute."""

    extra: int


class Structure(ctypes.Structure):
    """A field in C."""

    _fields_ = (("value", ctypes.c_double),)


class Level(enum.IntEnum):
    """Levels."""

    ONE, TWO, THREE, FOUR = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Compared by value."""

    value: int


Pair = collections.namedtuple("Pair", "first second")
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


def extra(i: int) -> Extra:
    made = Extra(1.0)
    made.extra = i
    return made


def lasting(made: Any, change: Callable[[Any, int], object]) -> Make:
    """One object, which is changed between the calls."""

    def make(i: int) -> Any:
        change(made, i)
        return made

    return make


def weak_values() -> Make:
    held: list[Slots] = []
    table: weakref.WeakValueDictionary[str, Slots] = weakref.WeakValueDictionary()

    def make(i: int) -> Any:
        held.append(Slots(i))
        table["a"] = held[-1]
        return table

    return make


def refill(waiting: queue.Queue[int], i: int) -> None:
    while not waiting.empty():
        waiting.get()
    for _ in range(i):
        waiting.put(1)


def rewrite(file: io.StringIO, i: int) -> None:
    file.seek(0)
    file.truncate()
    file.write("a" * i)


def parsed(i: int) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser["a"] = {"v": str(i)}
    return parser


def read_only(i: int) -> Any:
    made = numpy.array([float(i)])
    made.setflags(write=False)
    return made


def shadowed(i: int) -> Any:
    return collections.ChainMap({}, {"a": i})


HELD = [0]


class Numbered:
    """Python answers what C code asks it."""

    def __index__(self) -> int:
        return HELD[0]

    def __float__(self) -> float:
        return float(HELD[0])

    def __iter__(self) -> Any:
        return iter(range(HELD[0]))

    def __getitem__(self, place: int) -> int:
        if place >= HELD[0]:
            raise IndexError(place)
        return place

    def __len__(self) -> int:
        return HELD[0]

    def __bool__(self) -> bool:
        return HELD[0] % 2 == 1

    def __hash__(self) -> int:
        return HELD[0]

    def __eq__(self, other: object) -> bool:
        return HELD[0] % 2 == 1

    def __contains__(self, item: object) -> bool:
        return HELD[0] % 2 == 1

    def __format__(self, how: str) -> str:
        return "a" * HELD[0]


def numbered(i: int) -> Numbered:
    HELD[0] = i
    return Numbered()


def in_builtins(i: int) -> None:
    builtins.torchcompile_test_value = i  # type: ignore[attr-defined]


# Of what C code asks an object whose methods are in Python.
ASKED: dict[str, Read] = {
    "an index": lambda s: [0, 1, 2, 3, 4][s],
    "an index of a text": lambda s: ord("abcde"[s]),
    "a range": lambda s: len(range(s)),
    "a character": lambda s: ord(chr(s)),
    "a factorial": lambda s: math.factorial(s) + math.gcd(s, 4) + math.comb(5, s),
    "a root": lambda s: math.sqrt(s) + math.atan2(s, 2) + math.hypot(s, s) + math.log(s),
    "a float": float,
    "a whole number": lambda s: operator.index(s) + int(s),
    "keys": lambda s: len(dict.fromkeys(s)),
    "a deque": lambda s: len(collections.deque(s)) + len(collections.deque(s, 2)),
    "a deque's end": lambda s: (d := collections.deque(), d.extend(s), len(d))[2],
    "a counter": lambda s: len(collections.Counter(s)),
    "a product": lambda s: math.prod(s) + math.fsum(s),
    "sums": lambda s: sum(s) + max(s, default=0) + len(sorted(s)) + any(s),
    "sequences": lambda s: len(list(s)) + len(tuple(s)) + len({*s}) + len([*s, *s]),
    "sets": lambda s: len({1, 2}.union(s)) + len({1, 2}.symmetric_difference(s)) + {0}.issubset(s),
    "iterators": lambda s: len(list(itertools.chain(s, s))) + len(list(itertools.islice(s, 2))) + len(list(zip(s, s))),
    "a fold": lambda s: functools.reduce(operator.add, s, 0),
    "a part": lambda s: len([1, 2, 3, 4, 5][:s]) + [1, 2, 3, 4, 5][slice(s)][-1],
    "bytes": lambda s: len(bytearray(s)) + (5).to_bytes(s, "little")[0],
    "an array": lambda s: len(array.array("i", s)),
    "whole parts": lambda s: math.floor(s) + math.ceil(s),
    "a distance": lambda s: math.dist([s], [0]) + math.fsum([s, s]),
    "a packed number": lambda s: struct.pack("i", s)[0],
    "a day": lambda s: datetime.date(2000, s, 1).month,
    "a text's length": lambda s: len("a".center(s)) + len("a b c d".split(" ", s)) + "aaaa".replace("a", "b", s).count("b"),
    "places": lambda s: (xs := [1, 2, 3, 4, 5, 6], xs.insert(s, 9), xs.index(9) + xs.pop(s))[2],
    "turns": lambda s: (d := collections.deque([1, 2, 3, 4, 5]), d.rotate(s), d[0])[2],
    "a first number": lambda s: list(enumerate([1], s))[0][0] + len(list(itertools.repeat(1, s))),
    "copies of an iterator": lambda s: len(list(itertools.tee(s)[0])),
    "truth": lambda s: (1 if s else 0) + (not s),
    "a length": len,
    "a hash": hash,
    "an equality": lambda s: 1 if s == 7 else 0,
    "whether it has": lambda s: 3 in s,
    "a text": lambda s: len(f"{s}"),
}  # fmt: skip
ROWS: dict[str, tuple[Make, Read]] = {
    **{f"Python gives C {what}": (numbered, read) for what, read in ASKED.items()},
    "a name among the builtins": (in_builtins, lambda s: torchcompile_test_value),  # type: ignore[name-defined]  # noqa: F821
    "bytearray's item": (lasting(bytearray(1), lambda s, i: s.__setitem__(0, i)), lambda s: s[0]),
    "bytearray's length": (bytearray, len),
    "bytearray's sum": (lasting(bytearray(1), lambda s, i: s.__setitem__(0, i)), sum),
    "bytearray as a number": (lambda i: bytearray([i]), lambda s: int.from_bytes(s, "little")),
    "array's item": (lasting(array.array("d", [0.0]), lambda s, i: s.__setitem__(0, i)), lambda s: s[0]),
    "array's list": (lasting(array.array("d", [0.0]), lambda s, i: s.__setitem__(0, i)), lambda s: s.tolist()[0]),
    "array as a tensor": (lambda i: array.array("d", [float(i)]), lambda s: torch.tensor(s)),
    "array in a list as a tensor": (lambda i: array.array("d", [float(i)]), lambda s: torch.tensor([list(s)])),
    "array's memory": (lambda i: array.array("d", [float(i)]), lambda s: torch.frombuffer(s, dtype=torch.float64)),
    "array as NumPy's": (lambda i: array.array("d", [float(i)]), lambda s: torch.from_numpy(numpy.array(s))),
    "memoryview": (lambda i: memoryview(bytes([i])), lambda s: s[0] + s.tolist()[0] + s.tobytes()[0]),
    "deque": (lasting(collections.deque([0]), lambda s, i: s.__setitem__(0, i)), lambda s: s[0] + sum(s)),
    "counter": (lambda i: collections.Counter("a" * i), lambda s: s["a"] + s.total() + s.most_common(1)[0][1]),
    "defaultdict": (lambda i: collections.defaultdict(int, a=i), lambda s: s["a"] + s["b"]),
    "ordered dict": (lambda i: collections.OrderedDict(a=i), lambda s: s["a"] + next(iter(s.values()))),
    "chain of maps": (shadowed, lambda s: s["a"]),
    "a user's dict": (lambda i: collections.UserDict(a=i), lambda s: s["a"]),
    "a user's list": (lambda i: collections.UserList([i]), lambda s: s[0]),
    "shown mapping": (lambda i: types.MappingProxyType({"a": i}), lambda s: s["a"] + s.get("a") + sum(s.values())),
    "namespace": (lasting(types.SimpleNamespace(v=0), lambda s, i: setattr(s, "v", i)), lambda s: s.v + vars(s)["v"]),
    "weak values": (weak_values(), lambda s: s["a"].value),
    "weak values' count": (weak_values(), len),
    "queue": (lasting(queue.Queue(), refill), lambda s: s.qsize()),
    "file of text": (lasting(io.StringIO(), rewrite), lambda s: len(s.getvalue()) + s.tell()),
    "decimal context": (lambda i: decimal.Context(prec=i), lambda s: s.prec),
    "what a decimal context computes": (
        lambda i: decimal.Context(prec=i), lambda s: float(s.divide(decimal.Decimal(1), decimal.Decimal(3))),
    ),
    "decimal": (decimal.Decimal, float),
    "fraction": (lambda i: fractions.Fraction(i, 7), lambda s: float(s) + s.numerator),
    "time span": (lambda i: datetime.timedelta(i), lambda s: s.days + s.total_seconds()),
    "date": (lambda i: datetime.date(2000 + i, 1, 1), lambda s: s.year),
    "time": (lambda i: datetime.time(i), lambda s: s.hour + int(s.isoformat()[:2])),
    "time zone": (lambda i: datetime.timezone(datetime.timedelta(hours=i)), lambda s: s.utcoffset(None).seconds),
    "uuid": (lambda i: uuid.UUID(int=i), lambda s: s.int),
    "address": (ipaddress.ip_address, int),
    "path": (lambda i: pathlib.Path("a" * i), lambda s: len(s.name)),
    "path of another system": (lambda i: pathlib.PureWindowsPath("a" * i), lambda s: len(s.name)),
    "match": (lambda i: re.match("a*", "a" * i), lambda s: len(s.group()) + s.end()),
    "pattern": (lambda i: re.compile("a" * i), lambda s: len(s.pattern)),
    "struct": (lambda i: struct.Struct("i" * i), lambda s: s.size),
    "counting iterator": (itertools.count, next),
    "cycle": (lambda i: itertools.cycle([i, 9]), next),
    "list's iterator": (lambda i: iter([i, 2]), next),
    "generator": (lambda i: (j for j in [i, 3]), next),
    "enumeration": (lambda i: enumerate([i]), lambda s: next(s)[1]),
    "map": (lambda i: map(abs, [i]), next),
    "dict's items": (lambda i: {1: i}.items(), lambda s: list(s)[0][1]),
    "dict's values": (lambda i: {1: i}.values(), sum),
    "partial": (lambda i: functools.partial(operator.add, i), lambda s: s(2)),
    "partial's parts": (lambda i: functools.partial(max, i, key=abs), lambda s: s.args[0] + len(s.keywords) + s.func(1, 2)),
    "item getter": (operator.itemgetter, lambda s: s([1, 2, 3, 4, 5, 6])),
    "method caller": (lambda i: operator.methodcaller("__add__", i), lambda s: s(3)),
    "slots": (Slots, lambda s: s.value),
    "descriptor": (Described, lambda s: s.value),
    "any attribute": (Answers, lambda s: s.anything),
    "int of a class": (Number, lambda s: s + 1),
    "text of a class": (lambda i: Text("a" * i), len),
    "float's attribute": (extra, lambda s: s.extra),
    "named tuple": (lambda i: Pair(i, 2), lambda s: s.first),
    "frozen record": (Frozen, lambda s: s.value + (1 if s == Frozen(2) else 0)),
    "enum": (Level, lambda s: s.value),
    "slice": (lambda i: slice(0, i), lambda s: len([1, 2, 3, 4, 5][s])),
    "complex": (lambda i: complex(i, 1), lambda s: s.real),
    "bytes": (lambda i: bytes([i]), lambda s: s[0]),
    "set": (lambda i: {i}, lambda s: max(s) + (1 if 2 in s else 0)),
    "frozen set": (lambda i: frozenset({i}), sum),
    "template": (lambda i: string.Template("a" * i), lambda s: len(s.template)),
    "arguments": (lambda i: argparse.Namespace(v=i), lambda s: s.v),
    "exception": (lambda i: ValueError("a" * i), lambda s: len(s.args[0]) + len(str(s))),
    "signature": (lambda i: inspect.signature(lambda *a: 0, follow_wrapped=i > 2), lambda s: len(s.parameters)),
    "code": (lambda i: compile("1;" * i, "f", "exec"), lambda s: len(s.co_code)),
    "C's number": (ctypes.c_double, lambda s: s.value),
    "C's field": (Structure, lambda s: s.value),
    "C's array": (lambda i: (ctypes.c_int * 2)(i), lambda s: s[0] + sum(s)),
    "settings of a file": (parsed, lambda s: int(s["a"]["v"]) + s.getint("a", "v")),
    "thread's own": (lasting(threading.local(), lambda s, i: setattr(s, "v", i)), lambda s: s.v),
    "variable of a context": (lasting(VARIABLE, lambda s, i: s.set(i)), lambda s: s.get()),
    "generator of Python's": (random.Random, lambda s: s.random()),
    "generator's seed": (lambda i: torch.Generator().manual_seed(i), lambda s: s.initial_seed()),
    "array of objects": (lambda i: numpy.array([i, "a"], dtype=object), lambda s: s[0]),
    "array of texts": (lambda i: numpy.array(["a" * i]), lambda s: len(s[0])),
    "array that is read only": (read_only, lambda s: torch.tensor(s).sum() + s.item() + float(s.sum())),
    "array of other bytes": (lambda i: numpy.array([i], dtype=">f8"), lambda s: float(s[0])),
    "array of days": (lambda i: numpy.array([i], dtype="datetime64[D]"), lambda s: int(s.astype(int)[0])),
    "masked array": (lambda i: numpy.ma.array([float(i)]), lambda s: float(s.sum())),
    "record array": (lambda i: numpy.rec.array([(i,)], dtype=[("a", "f8")]), lambda s: float(s.a[0])),
    "matrix": (lambda i: numpy.matrix([[float(i)]]), lambda s: float(s[0, 0])),
    "polynomial": (lambda i: numpy.poly1d([i]), lambda s: float(s(1))),
    "function over elements": (lambda i: numpy.vectorize(lambda x: x + i), lambda s: float(s(1))),
    "dtype": (lambda i: numpy.dtype(f"f{(2, 2, 4, 8, 8)[i]}"), lambda s: s.itemsize),
    "size": (lambda i: torch.Size([i]), lambda s: s.numel()),
    "meta tensor": (lambda i: torch.empty(i, device="meta"), lambda s: s.shape[0]),
    "sparse tensor": (lambda i: torch.eye(3).mul(i).to_sparse(), lambda s: s.to_dense().sum()),
    "memory of a tensor": (lambda i: torch.ones(i).untyped_storage(), len),
}  # fmt: skip


@pytest.mark.expected_eager(...)
@pytest.mark.parametrize("what", ROWS)
def test_what_is_read_of_an_object_is_that_of_the_call(what: str) -> None:
    make, read = ROWS[what]

    def program(x: torch.Tensor, s: Any) -> Any:
        return x + read(s)

    def run(function: Callable[..., Any]) -> list[Any]:
        return [function(torch.ones(3, dtype=torch.float64), make(i)) for i in (1, 2, 4, 3)]

    expected, found = run(program), run(torchcompile.compile(program))
    torch.testing.assert_close(found, expected)
    faults = [str(event) for event in torchcompile.report().events if event.kind.id == "capture_fault"]
    assert not faults, faults
