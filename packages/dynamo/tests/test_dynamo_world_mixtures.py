# ruff: noqa: E701, E702, E741, F841, PLW1641, RUF012, UP031, C416, B905, PLW0603, PLC3002, PLR0124, B008, B023, B009, B012
# ruff: noqa: PLE0643, B904, RUF023, B007, RUF059, PIE804, PLC0415 - programs as people write them
"""Denser programs: each uses many features of classes, records, containers and contexts at once."""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import heapq
import math
import operator
import typing
from typing import Any

import pytest
import torch
from world_cases import Case, case, cases_of, check


class Delegate:
    def __init__(self, inner):
        self.inner = inner
        self.asked = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        self.asked.append(name)
        return getattr(self.inner, name)


class Inner:
    def __init__(self):
        self.k = 2.0

    def scale(self, x):
        self.k += 1
        return x * self.k


@case(lambda: Delegate(Inner()))
def delegate(x, d):
    y = d.scale(x) + d.k
    return y, hasattr(d, "nothing"), hasattr(d, "_no"), getattr(d, "other", 7), list(d.asked)


class Temp:
    def __init__(self):
        self._c = 1.0

    @property
    def c(self):
        return self._c

    @c.setter
    def c(self, v):
        if v > 3:
            raise ValueError("hot")
        self._c = v

    @c.deleter
    def c(self):
        self._c = 0.0


@case(Temp)
def prop_setter(x, t):
    try:
        t.c += 1
    except ValueError as e:
        del t.c
        return x, str(e), t.c
    return x * t.c


class Counted:
    count = 0
    registry = []

    def __init__(self):
        type(self).count += 1
        Counted.registry.append(self)

    @classmethod
    def make(cls, n):
        return [cls() for _ in range(n)]

    @staticmethod
    def twice(v):
        return v * 2

    def __init_subclass__(cls, tag=None, **kw):
        super().__init_subclass__(**kw)
        cls.tag = tag


class Vec:
    def __init__(self, t):
        self.t = t

    def __add__(self, o):
        return Vec(self.t + (o.t if isinstance(o, Vec) else o))

    __radd__ = __add__

    def __matmul__(self, o):
        return ("mm", self.t)

    def __rmatmul__(self, o):
        return ("rmm", self.t)

    def __eq__(self, o):
        return isinstance(o, Vec) and self.t is o.t

    def __hash__(self):
        return 5

    def __neg__(self):
        return Vec(-self.t)

    def __getitem__(self, i):
        return self.t[i]

    def __len__(self):
        return len(self.t)

    def __bool__(self):
        return True

    def __iter__(self):
        return iter([self.t, self.t])

    def __contains__(self, v):
        return v == 3

    def __call__(self, y, *a, k=1):
        return self.t * y * k

    def __divmod__(self, o):
        return (1, 2)

    def __pow__(self, o, m=None):
        return ("pow", o, m)

    def __index__(self):
        return 1

    def __float__(self):
        return 2.5

    def __round__(self, n=None):
        return ("round", n)

    def __trunc__(self):
        return 9

    def __reversed__(self):
        return iter([1])

    def __format__(self, s):
        return f"<{s}>"

    def __iadd__(self, o):
        self.t = self.t + o
        return self


@case(lambda: Vec(2.0))
def dunders(x, v):
    w = Vec(x)
    s = w + 1
    r = x.sum().item if False else None
    t = 1 + w
    v += 1
    return (
        s.t,
        t.t,
        (-w).t,
        w[0],
        len(w),
        bool(w),
        [a for a in w],
        3 in w,
        w(2, k=3),
        divmod(w, 2),
        w**2,
        pow(w, 2, 3),
        [10, 20][v],
        float(v),
        round(v, 2),
        math.trunc(v),
        list(reversed(v)),
        f"{v:abc}",
        v == Vec(v.t),
        {v: 1}[v],
        v @ 1,
        1 @ v,
        v.t,
    )


class RAdd:
    def __radd__(self, o):
        return ("radd", type(o).__name__)

    def __rmul__(self, o):
        return o + o

    def __rmatmul__(self, o):
        return o * 3

    def __eq__(self, o):
        return "eq"


@case(RAdd)
def tensor_with_reflected(x, r):
    return x * r, x @ r, x == r, x + 1


@dataclasses.dataclass(order=True)
class P:
    a: int
    b: float = dataclasses.field(default=1.0, compare=False)
    c: list = dataclasses.field(default_factory=list, repr=False)
    k: dataclasses.InitVar[int] = 3

    def __post_init__(self, k):
        self.c.append(k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class F:
    a: int
    t: Any = None


@case(lambda: P(1))
def datac(x, p):
    q = dataclasses.replace(p, a=p.a + 1, k=9)
    p.c.append(len(p.c))
    d = dataclasses.asdict(q)
    f = F(a=1, t=x)
    try:
        f.a = 3
        err = None
    except dataclasses.FrozenInstanceError as e:
        err = str(e)
    p.a += 1
    return (
        x * q.a,
        q,
        d,
        dataclasses.astuple(p),
        p < q,
        sorted([q, p]),
        repr(p),
        [fl.name for fl in dataclasses.fields(p)],
        f,
        err,
        hash(F(a=1)) == hash(F(a=1)),
        p == q,
    )


NT = collections.namedtuple("NT", "a b", defaults=[3])


class NT2(typing.NamedTuple):
    x: Any
    n: int = 2

    def both(self):
        return self.x * self.n


@case(lambda: NT([1], 2))
def nts(x, n):
    m = NT2(x)
    n.a.append(4)
    a, *rest = n
    match m:
        case NT2(x=q, n=2):
            z = q
        case _:
            z = None
    return (
        m.both(),
        m._replace(n=5),
        n._asdict(),
        NT._make([1, 2]),
        NT(1),
        n._fields,
        a,
        rest,
        z,
        isinstance(n, tuple),
        n[0],
        n.index(2),
        NT2.__annotations__ is not None,
    )


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    @property
    def low(self):
        return self.name.lower()

    @classmethod
    def default(cls):
        return cls.BLUE


class Num(enum.IntEnum):
    A = enum.auto()
    B = enum.auto()


class Perm(enum.Flag):
    R = 1
    W = 2
    X = 4


class S(enum.StrEnum):
    U = "u"


@case(lambda: {"c": Color.RED, "p": Perm.R})
def enums_(x, s):
    s["c"] = Color.BLUE if s["c"] is Color.RED else Color.RED
    s["p"] |= Perm.W
    return (
        x * s["c"].value,
        s["c"].low,
        Color["RED"],
        Color(2),
        [c.name for c in Color],
        Num.B + 1,
        Num(1),
        Perm.R | Perm.X,
        Perm.W in s["p"],
        ~Perm.R,
        S.U + "x",
        Color.default(),
        {Color.RED: 1}[Color.RED],
        len(Color),
        str(Color.RED),
        repr(Num.A),
        f"{S.U}",
        Color.RED == 1,
        Num.A == 1,
        bool(Perm.R & Perm.W),
        Color.__members__["RED"],
        isinstance(s["c"], Color),
    )


@case(lambda: collections.defaultdict(lambda: [0]))
def dds(x, d):
    d["a"].append(len(d))
    d["b"]
    d.setdefault("c", x.shape[0])
    inner = collections.defaultdict(lambda: collections.defaultdict(list))
    inner[1][2].append(x)
    tot = collections.defaultdict(lambda: torch.zeros(2, 3))
    for i in range(4):
        tot[i % 2] = tot[i % 2] + x * i
    return inner, dict(tot), d["a"], "zz" in d, d.get("zz"), len(d)


@case(lambda: collections.OrderedDict(a=1, b=2, c=3))
def ods(x, d):
    d.move_to_end("a")
    first = next(iter(d))
    k, v = d.popitem(last=False)
    d["new%d" % len(d)] = v
    d[k] = v + 1
    return x * v, first, list(d), list(reversed(d)), d == dict(d), k


@case(lambda: collections.Counter("abca"))
def cnt(x, c):
    c.update("bb")
    c["z"] += 1
    c.subtract(a=1)
    return (
        x * c["b"],
        c.most_common(2),
        c + collections.Counter(b=1),
        c - collections.Counter(b=1),
        sorted(c.elements()),
        c & collections.Counter("ab"),
        c | collections.Counter("q"),
        sum(c.values()),
        c["nope"],
    )


@case(lambda: collections.deque([1, 2, 3], maxlen=4))
def deq(x, d):
    d.append(len(d))
    d.appendleft(9)
    d.rotate(1)
    a = d.pop()
    b = d.popleft()
    d.extend([7, 8])
    d.extendleft([5])
    d.insert(1, 77) if len(d) < 4 else None
    d[0] = 100
    return (
        x * a,
        a,
        b,
        list(d),
        d.maxlen,
        d.count(7),
        7 in d,
        d.index(7) if 7 in d else None,
        collections.deque(d, 2),
        len(d),
    )


@case(lambda: {1, 2, 3})
def sets_(x, s):
    s.add(len(s) + 1)
    s.discard(1)
    t = s | {9}
    u = s & {2, 3}
    s ^= {50}
    s -= {2}
    s.update([5], [6])
    return (
        x * len(s),
        t,
        u,
        s <= t,
        s.isdisjoint({1000}),
        frozenset(s),
        sorted(s),
        {frozenset({1}): 2}[frozenset({1})],
        s.issuperset({3}),
    )


@case(lambda: {"a": 1, "b": 2})
def dicts_(x, d):
    d |= {"c": len(d)}
    e = d | {"z": 1}
    del d["a"]
    d["a"] = 5
    p = d.pop("b")
    d["b"] = p + 1
    ks = d.keys() & {"a", "q"}
    it = d.items()
    d.update(k=2, **{"kk": 3})
    d.setdefault("a", 0)
    return (
        x * p,
        e,
        ks,
        list(it),
        {v: k for k, v in d.items()},
        dict.fromkeys("ab", 0),
        d == e,
        list(reversed(d)),
        d.popitem(),
        max(d, key=d.get),
        dict(zip("ab", [x, x])),
        sorted(d.items(), key=lambda kv: -kv[1]),
        [*d],
        {**d, "x": x},
    )


@case(lambda: [3, 1, 2])
def sorts(x, l):
    calls = []

    def key(v):
        calls.append(v)
        return -v

    l.sort(key=key)
    l.append(l[0] + 1)
    names = sorted(["bb", "a", "ccc"], key=len, reverse=True)
    recs = sorted([(2, "b"), (1, "z"), (2, "a")], key=operator.itemgetter(0))
    ts = sorted([x, x[0], x[None]], key=lambda t: t.dim())
    try:
        sorted([1, "a"])
        e = None
    except TypeError as er:
        e = str(er)
    return (
        x * l[0],
        calls,
        names,
        recs,
        ts,
        min(l, key=lambda v: v % 2),
        max([], default=0),
        sorted(l, key=functools.cmp_to_key(lambda a, b: a - b)),
        e,
        sorted({"b": 1, "a": 2}),
        list(reversed(l)),
        heapq.nlargest(2, l),
        bisect.bisect([1, 2, 3], 2),
    )


@case(lambda: {"t": torch.ones(3), "l": [1, [2]]})
def copies_(x, s):
    a = copy.copy(s)
    b = copy.deepcopy(s)
    a["l"].append(3)
    b["l"][1].append(4)
    b["t"] += 1
    c = copy.deepcopy(Temp())
    c.c = 2.0
    m = {}
    m["self"] = m
    mm = copy.deepcopy(m)
    return (
        x * c.c,
        a,
        b,
        s["l"],
        mm["self"] is mm,
        a["l"] is s["l"],
        b["t"] is s["t"],
        copy.copy([1, 2]),
        copy.replace(P(1), a=3) if hasattr(copy, "replace") else None,
    )


class Swallow:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("in")
        return self

    def __exit__(self, t, v, tb):
        self.log.append((t.__name__ if t else None, str(v)))
        return t is KeyError


@case(list)
def ctx(x, log):
    with Swallow(log) as s:
        x = x + 1
        {}["k"]
    try:
        with Swallow(log), Swallow(log):
            x = x * 2
            raise ValueError("v")
    except ValueError as e:
        log.append(e.args)

    def f():
        with Swallow(log):
            return 5

    for i in range(3):
        with Swallow(log):
            if i == 1:
                continue
            if i == 2:
                break
    with contextlib.ExitStack() as st:
        for _ in range(2):
            st.enter_context(Swallow(log))
        kept = st.pop_all()
    kept.close()
    return x, f()


class Deco(contextlib.ContextDecorator):
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("e")

    def __exit__(self, *a):
        self.log.append("x")


@case(list)
def ctxdeco(x, log):
    @Deco(log)
    def f(y):
        log.append("f")
        return y * 2

    return f(x), f(x)


@typing.runtime_checkable
class HasLen(typing.Protocol):
    def __len__(self): ...


class TD(typing.TypedDict):
    a: int


T = typing.TypeVar("T")


class Gen(typing.Generic[T]):
    def __init__(self, v: T):
        self.v = v


UserId = typing.NewType("UserId", int)


@case(list)
def typings(x, l):
    l.append(len(l))
    d: TD = {"a": 1}
    td = TD(a=2)
    g = Gen[int](3)
    y = typing.cast(torch.Tensor, x)
    z: typing.Optional[int] = None
    return (
        y * g.v,
        isinstance(l, HasLen),
        td,
        UserId(4),
        typing.get_args(typing.Literal[1, 2]),
        isinstance(3, int | str),
        issubclass(bool, int),
        z,
        typing.get_type_hints(P.__post_init__),
        d,
        isinstance(l, typing.Sized),
        Gen.__parameters__ == (T,),
    )


@pytest.mark.parametrize("found", cases_of(__name__))
@pytest.mark.filterwarnings("ignore")
def test_mixtures(found: Case) -> None:
    check(found)
