"""Which classes are of Python, and which are C's, on every version of CPython."""

from __future__ import annotations

import array
import ast
import collections
import contextlib
import dataclasses
import enum
import functools
import io
import itertools
import operator
import random
import re
import select
import sys
import threading
import time
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo
from torchdynamo.interpreter.classes import is_python_class, may_change, native_base

T = typing.TypeVar("T")


class Plain:
    pass


class Slotted:
    __slots__ = ("a",)


class OfGeneric(typing.Generic[T]):
    pass


class Text(io.StringIO):
    pass


class Numbers(array.array):  # type: ignore[type-arg]
    pass


class Table(collections.defaultdict):  # type: ignore[type-arg]
    pass


class Made(Plain, ValueError):
    def __new__(cls, *args: Any) -> Made:
        return super().__new__(cls, *args)


class Color(enum.Enum):
    RED = 1


class Pair(typing.NamedTuple):
    a: int


class NoNew:
    __new__ = object.__new__


@dataclasses.dataclass(slots=True)
class Record:
    a: int


# What allocates the objects of a class that a class statement made.
PYTHON_CLASSES: dict[type, type] = {
    Plain: object, Slotted: object, OfGeneric: object, typing.Generic: object, NoNew: object, Record: object,
    Text: io.StringIO, Numbers: array.array, Table: collections.defaultdict, Made: ValueError, Color: object, Pair: tuple,
    type("Anonymous", (), {}): object, torch.nn.Module: object, torch.nn.Parameter: torch._C.TensorBase,
    enum.EnumType: type, random.Random: random.Random.__base__,  # type: ignore[dict-item]
    contextlib.ExitStack: object, contextlib.suppress: object, collections.UserDict: object, collections.Counter: dict,
    re.error: Exception, threading.Thread: object, types.DynamicClassAttribute: object, io.RawIOBase: io.RawIOBase.__base__,
}  # fmt: skip
C_TYPES: list[Any] = [
    object, int, list, dict, type, BaseException, types.FunctionType, types.SimpleNamespace, torch.Size, torch.dtype,
    io.StringIO, io.BytesIO, io.TextIOWrapper, collections.deque, collections.defaultdict, collections.OrderedDict,
    functools.partial, operator.itemgetter, operator.attrgetter, itertools.chain, itertools.count, itertools.islice,
    type(itertools.tee([])[0]), array.array, re.Pattern, re.Match, threading.local, type(threading.RLock()),
    type(functools.cache(len)), random.Random.__base__, ast.AST, select.epoll, time.struct_time,
]  # fmt: skip


@pytest.mark.parametrize("kind", PYTHON_CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_of_python(kind: type) -> None:
    assert is_python_class(kind) and may_change(kind)
    assert native_base(kind) is PYTHON_CLASSES[kind]


@pytest.mark.parametrize("kind", C_TYPES, ids=lambda kind: kind.__name__)
def test_a_type_of_c(kind: type) -> None:
    assert not is_python_class(kind)
    assert native_base(kind) is kind


def loaded_classes() -> set[type]:
    found: set[type] = set()
    todo: list[type] = [object]
    while todo:
        new = set(type.__subclasses__(todo.pop())) - found
        found |= new
        todo += new
    return found


def test_every_loaded_class() -> None:
    """`object.__new__` makes what it is said to make, and no class that cannot change has a method in Python."""
    for kind in loaded_classes():
        package = str(kind.__module__).partition(".")[0]  # a class may say anything
        if package not in sys.stdlib_module_names and package != "torch":  # others fill classes by hand, from C
            continue
        if not may_change(kind) and package != "torch":  # which fills its old tensor types so
            assert not [value for value in vars(kind).values() if isinstance(value, types.FunctionType)], kind
        abstract = getattr(kind, "__abstractmethods__", None) if kind is not type else None
        if is_python_class(kind) and native_base(kind) is object and not abstract and not hasattr(kind, "__del__"):
            made: Any = object.__new__
            assert type(made(kind)) is kind


def stream(x: torch.Tensor) -> tuple[torch.Tensor, io.StringIO]:
    out = io.StringIO()
    out.write("a")
    return x + 1, out


def given_stream(x: torch.Tensor, out: io.StringIO) -> tuple[torch.Tensor, str]:
    out.write("b")
    return x + 1, out.getvalue()


def subclass_of_c(x: torch.Tensor) -> tuple[torch.Tensor, Text]:
    out = Text("begun")
    return x + 1, out


def given_queue(x: torch.Tensor, queue: collections.deque[int]) -> torch.Tensor:
    queue.append(queue[0] + 1)
    return x * sum(queue)


def given_table(x: torch.Tensor, table: collections.defaultdict[str, list[int]]) -> torch.Tensor:
    table["new"].append(len(table))
    return x + table["new"][-1]


def given_partial(x: torch.Tensor, call: Callable[..., torch.Tensor]) -> torch.Tensor:
    return call(x) + len(call.args)  # type: ignore[attr-defined]


def given_array(x: torch.Tensor, numbers: array.array[int]) -> torch.Tensor:
    numbers.append(numbers[0] + len(numbers))
    return x * numbers[-1]


class Guarded:
    """A lock of the program's own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.count = 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.count += 1
            return x * self.count


def locked(x: torch.Tensor, owner: Guarded) -> torch.Tensor:
    return owner.step(x)


def shown(value: Any) -> Any:
    if isinstance(value, io.StringIO):
        return type(value), value.getvalue(), value.tell()
    if isinstance(value, tuple):
        return tuple(map(shown, value))
    if isinstance(value, Guarded):
        return value.count, value.lock.acquire(blocking=False)
    if isinstance(value, functools.partial):
        return value.args
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("program", "state"),
    [
        (stream, None),
        (given_stream, io.StringIO),
        (subclass_of_c, None),
        (given_queue, lambda: collections.deque([1, 2], maxlen=3)),
        (given_table, lambda: collections.defaultdict(list)),
        (given_partial, lambda: functools.partial(torch.mul, 3.0)),
        (given_array, lambda: array.array("i", [1, 2])),
        (given_array, lambda: Numbers("i", [1, 2])),
        (locked, Guarded),
    ],
    ids=lambda one: getattr(one, "__name__", "state"),
)
def test_objects_of_c_types_are_as_eager_leaves_them(
    program: Callable[..., Any], state: Callable[[], Any] | None
) -> None:
    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    given = [] if state is None else [state()]
    expected_given = [] if state is None else [state()]
    for call in range(3):
        x = torch.full((2,), float(call))
        assert shown(compiled(x, *given)) == shown(program(x, *expected_given))
        assert shown(tuple(given)) == shown(tuple(expected_given))
    expected = {"unsplit_frame"} if program is subclass_of_c else set()  # such an object cannot be made again
    assert {event.kind.id for event in torchdynamo.stats().fallbacks} == expected
