# ruff: noqa: E701, E702, E741, F841, PLW1641, RUF012, UP031, C416, B905, PLW0603, PLC3002, PLR0124, B008, B023, B009, B012
# ruff: noqa: PLE0643, B904, RUF023, B007, RUF059, PIE804, PLC0415 - programs as people write them
"""Denser programs on what classes inherit and answer, scopes, exceptions and iteration."""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import itertools
import types
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput
from world_cases import Case, case, cases_of, check


@dataclasses.dataclass
class Out(ModelOutput):
    loss: Any = None
    logits: Any = None
    extra: Any = None


@case()
def modelout(x, _):
    o = Out(logits=x * 2)
    o["loss"] = x.sum()
    o.extra = (x, x)
    a, *rest = o.to_tuple()
    p = BaseModelOutputWithPast(last_hidden_state=x)
    return (
        o,
        o[0],
        o["logits"],
        list(o),
        len(o),
        "extra" in o,
        o.get("nope", 3),
        [k for k, v in o.items()],
        a,
        p[0],
        isinstance(o, dict),
        o == o,
        p,
        dict(o).keys(),
        o[:2],
        Out(logits=None).keys(),
    )


@case(lambda: Out(logits=torch.ones(2)))
def modelout_given(x, o):
    o.loss = (o.loss if o.loss is not None else 0) + 1
    o["extra"] = x.shape[0]
    return x * o.loss, o.logits + 1, o.to_tuple(), list(o.keys())


class LazyDict(dict):
    def __missing__(self, k):
        self[k] = v = k * 2
        return v

    def __getattr__(self, n):
        try:
            return self[n]
        except KeyError:
            raise AttributeError(n)

    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        self.log.append(k) if "log" in self.__dict__ else None


@case(lambda: LazyDict(a=1))
def missing(x, d):
    d["zz"]
    d.__dict__["log"] = []
    d["w"] = 1
    d.update(q=3)
    return x * d["a"], d.q, d["bb"], list(d), d.log, d.nonono if hasattr(d, "zzz0") else None


class Typed:
    def __set_name__(self, o, n):
        self.n = "_" + n

    def __get__(self, o, t=None):
        return self if o is None else o.__dict__.get(self.n, 0)

    def __set__(self, o, v):
        if not isinstance(v, int):
            raise TypeError(self.n)
        o.__dict__[self.n] = v

    def __delete__(self, o):
        o.__dict__.pop(self.n, None)


class NonData:
    def __get__(self, o, t=None):
        return ("nd", t.__name__)


class HasD:
    a = Typed()
    b = Typed()
    nd = NonData()


@case(HasD)
def descs(x, o):
    o.a += 1
    try:
        o.b = "s"
    except TypeError as e:
        err = str(e)
    first = o.nd
    o.__dict__["nd"] = 5
    second = o.nd
    del o.__dict__["nd"]
    v = o.a
    if v > 1:
        del o.a
    return x * v, err, first, second, type(HasD.a).__name__, vars(o)


class Base:
    def f(self, x):
        return x + 1

    @classmethod
    def c(cls):
        return cls.__name__

    @staticmethod
    def s(v):
        return v

    @property
    def p(self):
        return 1


class Mix:
    def f(self, x):
        return super().f(x) * 2


class Derived(Mix, Base):
    def f(self, x):
        return super().f(x) - 1

    @classmethod
    def c(cls):
        return "d" + super().c()

    @property
    def p(self):
        return super().p + 1

    def __init__(self):
        super().__init__()
        self.h = super().f

    def comp(self):
        return [super(Derived, self).p for _ in range(2)]


@case(Derived)
def supers(x, d):
    return (
        d.f(x),
        d.c(),
        d.p,
        d.h(1),
        d.comp(),
        super(Derived, d).p,
        Derived.f(d, x),
        Base.f(d, x),
        d.s(4),
        Derived.__mro__[1].__name__,
        isinstance(d, Mix),
        issubclass(Derived, Base),
        d.f.__func__.__qualname__,
    )


class Meta(type):
    def __call__(cls, *a, **k):
        o = super().__call__(*a, **k)
        o.made = True
        return o

    def __len__(cls):
        return 7

    def __getattr__(cls, n):
        return n.upper()

    def __contains__(cls, v):
        return v == 1

    def __iter__(cls):
        return iter("ab")

    @property
    def mp(cls):
        return "mp"


class WithMeta(metaclass=Meta):
    def __init__(self, v):
        self.v = v


@case()
def metas(x, _):
    o = WithMeta(2)
    return x * o.v, o.made, len(WithMeta), WithMeta.foo, 1 in WithMeta, list(WithMeta), WithMeta.mp


class Inst:
    def __instancecheck__(self, o):
        return True


class AB(abc.ABC):
    @abc.abstractmethod
    def f(self): ...


class Reg:
    pass


@case()
def abcs(x, _):
    try:
        AB()
    except TypeError as e:
        err = type(e)
    return (
        x + 1,
        isinstance(Reg(), AB),
        isinstance([], collections.abc.Sequence),
        isinstance({}, collections.abc.Mapping),
        isinstance(lambda: 0, collections.abc.Callable),
        isinstance((i for i in ()), collections.abc.Iterator),
        err,
        isinstance(x, collections.abc.Iterable),
        isinstance(3, (int, str)),
        callable(x),
        isinstance(print, types.BuiltinFunctionType),
    )


@case(lambda: types.SimpleNamespace(a=1, b=[1]))
def namespaces(x, n):
    n.a += 1
    n.c = x.shape
    n.b.append(n.a)
    m = types.SimpleNamespace(**vars(n))
    del n.c
    return x * n.a, m, hasattr(n, "c"), sorted(vars(n))


G = [0]
GN = 1

G = [0]
GN = 1


def bump():
    global GN, NEWG
    GN += 1
    G.append(GN)
    NEWG = GN
    return GN


@case(calls=1)
def globs(x, _):
    b = bump()
    return x * 1, b - GN, G[-1] - b, NEWG - b


@case(lambda: [0])
def closures(x, s):
    n = 0

    def inc(by=1):
        nonlocal n
        n += by
        s[0] += 1
        return n

    inc()
    inc(by=3)
    fs = [lambda v, i=i: v * i for i in range(3)]
    late = [lambda v: v * j for j in range(3)]

    def outer():
        k = []

        def inner(v):
            k.append(v)
            return k

        return inner

    f = outer()
    f(1)

    def rec(m):
        return 1 if m < 2 else m * rec(m - 1)

    g = functools.partial(inc, by=5)
    g()
    return (
        x * n,
        [h(2) for h in fs],
        [h(2) for h in late],
        f(2),
        rec(5),
        (lambda *a, **k: (a, k))(1, z=2),
        inc.__closure__ is not None,
        f,
    )


def star(a, /, b, *c, d=4, **e):
    return a, b, c, d, e


@case()
def stars(x, _):
    l = [1, 2]
    d = {"d": 9, "q": 1}
    a, *b, c = range(5)
    (p, (q, *r)), t = (1, (2, 3, 4)), 5
    if (w := len(l)) > 1:
        w += 1
    return (
        star(1, 2),
        star(*l, 3, **d),
        star(b=1, a=2) if False else None,
        [*l, *range(2)],
        {**d, "x": 1},
        a,
        b,
        c,
        p,
        q,
        r,
        t,
        w,
        (lambda x=x: x.shape)(),
        print if False else 0,
        [y := 1, y**2],
        x + 1,
    )


@case(lambda: [1])
def trys(x, s):
    log = []

    def f(k):
        try:
            if k == 0:
                return "ret"
            if k == 1:
                raise KeyError("k")
            if k == 2:
                raise ValueError("v") from KeyError("c")
            if k == 3:
                return [1][5]
            if k == 4:
                assert s, "msg"
                assert not s, "msg2"
        except (KeyError, IndexError) as e:
            log.append(repr(e))
            return "exc"
        except ValueError as e:
            log.append((str(e), repr(e.__cause__)))
            raise RuntimeError("again") from e
        else:
            log.append("else")
        finally:
            log.append("fin%d" % k)
            if k == 5:
                return "finret"

    out = []
    for k in range(7):
        try:
            out.append(f(k))
        except Exception as e:
            out.append((type(e).__name__, str(e), type(e.__cause__).__name__, type(e.__context__).__name__))

    class My(Exception):
        def __init__(self, a):
            super().__init__(a, "z")
            self.a = a

    try:
        raise My(3)
    except My as e:
        out.append((e.a, e.args))
    try:
        try:
            raise ValueError(1)
        finally:
            log.append("f")
    except ValueError:
        pass
    e = ExceptionGroup("g", [ValueError(1)])
    out.append(len(e.exceptions))
    for i in range(3):
        try:
            if i == 1:
                continue
            if i == 2:
                break
        finally:
            log.append(i)
    return x + 1, out, log


@case(lambda: {"x": {"y": [torch.ones(2), {"z": (torch.zeros(1), 3)}]}})
def nested(x, s):
    def walk(o, f):
        if isinstance(o, torch.Tensor):
            return f(o)
        if isinstance(o, dict):
            return {k: walk(v, f) for k, v in o.items()}
        if isinstance(o, (list, tuple)):
            return type(o)(walk(v, f) for v in o)
        return o

    r = walk(s, lambda t: t + 1)
    s["x"]["y"][0] = r["x"]["y"][0]
    s["x"]["y"][1]["n"] = len(s["x"]["y"][1])
    import torch.utils._pytree as pt

    leaves, spec = pt.tree_flatten(r)
    return x + 1, r, len(leaves), pt.tree_map(lambda v: v, {"a": [x]}), pt.tree_unflatten(leaves, spec)


@case(lambda: [torch.ones(2, 3)])
def inpl(x, s):
    y = s[0]
    y += 1
    y.mul_(2)
    y[0] = 0
    s.append(y * 1)
    z = y.view(-1)
    z.add_(1)
    s[0] = y if len(s) < 3 else y * 1
    x2 = x
    x2 = x2 + 1
    x += 1
    return x, x2, y is s[0], y


class It:
    def __init__(s, n):
        s.n = n
        s.i = 0

    def __iter__(s):
        return s

    def __next__(s):
        if s.i >= s.n:
            raise StopIteration
        s.i += 1
        return s.i


class Seq:
    def __len__(self):
        return 3

    def __getitem__(self, i):
        if i >= 3:
            raise IndexError
        return i * 10


@case(lambda: It(3))
def useriters(x, it):
    a = next(it)
    r = [v for v in it]
    it.i = 0
    return (
        x * a,
        r,
        list(Seq()),
        20 in Seq(),
        list(reversed(Seq())),
        tuple(It(2)),
        sum(It(3)),
        dict(zip(It(2), Seq())),
        max(It(2)),
        sorted(It(3), reverse=True),
        [*It(1)],
        "".join(map(str, It(2))),
        list(enumerate(It(1))),
        list(itertools.chain(It(1), Seq())),
        set(It(2)),
        list(iter(lambda it=It(3): next(it), 2)),
        any(v > 1 for v in It(2)),
        list(itertools.islice(It(9), 2)),
    )


class Sl:
    __slots__ = ("a", "__weakref__")

    def __init__(self):
        self.a = 1


@case(Sl)
def slots(x, o):
    o.a += 1
    try:
        o.b = 1
    except AttributeError as e:
        err = str(e)
    n = Sl()
    n.a = o.a
    del n.a
    return x * o.a, err, hasattr(n, "a")


class Act(Enum):
    RELU = "relu"
    GELU = "gelu"

    def __call__(self, x):
        return getattr(torch.nn.functional, self.value)(x)


ACT = {"silu": nn.SiLU(), "tanh": torch.tanh}


@case(lambda: "relu")
def acts(x, n):
    return Act(n)(x), Act.GELU(x), ACT["silu"](x), ACT["tanh"](x), {a: a.value for a in Act}, Act.RELU.__class__ is Act


@pytest.mark.parametrize("found", cases_of(__name__))
@pytest.mark.filterwarnings("ignore")
def test_protocols(found: Case) -> None:
    check(found)
