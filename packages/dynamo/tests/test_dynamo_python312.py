"""Programs in the syntax of Python 3.12: comprehensions without a frame, type parameters, type aliases, f-strings."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from world_cases import same

import torchdynamo
from torchdynamo.interpreter import Interpreter, PlainWorld

# As text: Python 3.11 would not read it.
SOURCE = """
import contextlib
import dataclasses
import functools
import itertools
import typing

import torch
import torchdynamo

type Vec = list[torch.Tensor]
type Pair[T] = tuple[T, T]

def ident[T](x: T) -> T:
    return x

class Box[T]:
    kind: Vec
    def __init__(self, v: T):
        self.v = v
    def get(self) -> T:
        return self.v

@dataclasses.dataclass(slots=True)
class Record[T]:
    a: T
    b: int = 2

class Base:
    def __init__(self):
        self.k = 2
    @property
    def p(self):
        return self.k
    def go(self, x):
        return x * self.k

class Derived(Base):
    def __init__(self):
        super().__init__()
        self.k += super().p
    @typing.override
    def go(self, x):
        return super().go(x) + [super(Derived, self).go(x) for _ in range(1)][0]

def generic_function(x, _):
    return ident(x) + 1

def generic_class(x, _):
    return Box(x).get() * 2, Box[int](x).get()

def generic_record(x, _):
    r = Record(x)
    r.b += 1
    return r.a + r.b, dataclasses.replace(r, b=9).b

def generic_within(x, _):
    def inner[T: int, S: (int, str), *Ts, **P](y: T) -> T:
        return y + x
    bounds = [(p.__name__, getattr(p, "__bound__", None)) for p in inner.__type_params__]
    return inner(x), bounds, inner.__type_params__[1].__constraints__

def generic_class_within(x, _):
    k = x + 1
    class B[T: "B"]:
        def m[U](self, u: U) -> tuple[T, U]:
            return u, k
        type Inner = list[T]
    return B[int]().m(2), B.__parameters__[0].__bound__, B.Inner.__name__, B.__mro__[1].__name__

def alias_within(x, _):
    k = str
    type Local = list[k]
    type Missing = undefined_name
    try:
        Missing.__value__
    except NameError as error:
        return x + 1, Local.__name__, str(Local.__value__), str(error)

def alias_outside(x, _):
    return x + 1, Pair.__type_params__[0].__name__, str(Pair[int]), str(Vec.__value__)

def decorated(x, _):
    def deco[**P, R](fn: typing.Callable[P, R]) -> typing.Callable[P, R]:
        @functools.wraps(fn)
        def wrapper(*a: P.args, **k: P.kwargs) -> R:
            return fn(*a, **k)
        return wrapper
    @deco
    def g(y, *, z=1):
        return y + z
    return g(x, z=3), g.__name__

def comprehensions(x, _):
    ys = [x * i for i in range(3) if i]
    i = 5
    zs = {i: x + i for i in range(2)}
    return ys, zs, i, {k for k in "ab"}

def comprehension_that_raises(x, _):
    out = []
    d = "outer"
    try:
        out = [x / d if d else 1 // d for d in (1, 2, 0)]
    except ZeroDivisionError as error:
        return x + 1, str(error), d
    return out

def comprehension_of_a_class(x, _):
    class C:
        n = 3
        vals = [j for j in range(3)]
    return x + C.n, C.vals

def nested_comprehensions(x, _):
    return [[(a, b, x + a) for b in range(2)] for a in range(2)], [y := x + i for i in range(2)], y

def closures_of_comprehensions(x, _):
    return [f() for f in [lambda j=j: x + j for j in range(3)]], [f() for f in [lambda: x * j for j in range(3)]]

def nested_text(x, _):
    return f"{x.shape[0]!r:>{3}} {"nested " + f"{1 + 1}"} {dict(a=1)["a"]}", x + 1

def batches(x, _):
    return [x + sum(part) for part in itertools.batched([1, 2, 3], 2)]

def supers(x, _):
    return Derived().go(x), Derived().p, Derived.go.__override__

def break_behind_a_comprehension(x, _):
    if x.sum() > -1e9:
        ys = [x + i for i in range(2)]
        torchdynamo.graph_break()
        i = 7
        return [y * i for y in ys], i

def break_within_a_comprehension(x, _):
    out = []
    for i in range(2):
        out.append([x + i + (torchdynamo.graph_break() or 0) for i in range(2)])
    return out, i

def branch_within_a_comprehension(x, _):
    i = x
    return [[i + j for j in range(2) if i.sum() > -1e9] for i in (x, x * 2)], i

def number_within_a_comprehension(x, _):
    return {i: x.sum().item() for i in range(2)}, [torchdynamo.graph_break() or x + i for i in range(2) if i + 1]

def suppressed(x, seen):
    with contextlib.suppress(ValueError), torch.no_grad():
        seen.append(1)
        raise ValueError("a")
    return x + len(seen)
"""
DEFAULTS = """
def generic_defaults(x, _):
    def f[T = int, *Ts = tuple[int, ...], **P = [int]](y: T):
        return y
    return f(x) + 1, [str(p.__default__) for p in f.__type_params__]
"""


def programs() -> dict[str, Callable[..., Any]]:
    if sys.version_info < (3, 12):
        return {}
    text = SOURCE + (DEFAULTS if sys.version_info >= (3, 13) else "")
    module = types.ModuleType("programs_of_python_312")
    file = f"<{module.__name__}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec", dont_inherit=True), vars(module))
    sys.modules[module.__name__] = module  # dataclasses look there for what annotations name
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and name != "ident"
    }


PROGRAMS = programs()
pytestmark = pytest.mark.skipif(not PROGRAMS, reason="the syntax is of Python 3.12")


@pytest.mark.parametrize("name", PROGRAMS)
def test_interpreted(name: str) -> None:
    program = PROGRAMS[name]
    x = torch.randn(2, 3)
    assert same(program(x, []), Interpreter(PlainWorld()).run(program, x, []))


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled(name: str) -> None:
    torchdynamo.reset()
    program = PROGRAMS[name]
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    expected_state: list[int] = []
    state: list[int] = []
    for _ in range(3):
        x = torch.randn(2, 3)
        assert same(program(x, expected_state), compiled(x, state))
        assert state == expected_state
    stats = torchdynamo.stats()
    assert stats.graphs and not stats.fallbacks
    if "within_a_comprehension" not in name and not name.startswith("break"):
        assert not stats.breaks
