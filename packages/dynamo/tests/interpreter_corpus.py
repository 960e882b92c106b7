# ruff: noqa - the programs are meant to be odd
"""Programs over the whole language, without torch: each function is run natively and interpreted, and compared.

A program takes nothing and returns a value that compares by equality; an exception that it raises is part of its result.
"""

import abc
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import inspect
import itertools
import math
import operator
import re
import string
import sys
import types
import typing

PROGRAMS = []


def program(fn):
    PROGRAMS.append(fn)
    return fn


def caught(fn, *args, **kwargs):
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)


# -- arithmetic, names, control flow -----------------------------------------------------------


@program
def arithmetic():
    a, b = 17, 5
    return a + b, a - b, a * b, a / b, a // b, a % b, a**b, a << b, a >> 1, a & b, a | b, a ^ b, -a, +a, ~a, not a


@program
def inplace_arithmetic():
    a = 17
    a += 3
    a -= 1
    a *= 2
    a //= 3
    a **= 2
    a %= 100
    a <<= 2
    a >>= 1
    a &= 0xFF
    a |= 1
    a ^= 7
    a /= 2
    x = y = [1]
    x += (2, 3)
    x *= 2
    return a, x, x is y


@program
def comparisons():
    a, b = 3, 4.5
    return (
        a < b,
        a <= b,
        a == b,
        a != b,
        a > b,
        a >= b,
        a is b,
        a is not b,
        1 < a < 5 < 6,
        1 < a > 5,
        a in (3, 4),
        a not in [3],
    )


@program
def short_circuits():
    log = []

    def note(v):
        log.append(v)
        return v

    r = [
        note(0) or note(2),
        note(1) and note([]),
        note(None) or note("") or note("x"),
        not note(0),
        note(1) if note(0) else note(3),
    ]
    return r, log


@program
def loops():
    out = []
    for i in range(10):
        if i == 2:
            continue
        if i == 7:
            break
        out.append(i)
    else:
        out.append("no")
    for _ in []:
        pass
    else:
        out.append("else")
    n = 0
    while n < 5:
        n += 1
        if n == 3:
            continue
    else:
        out.append("while-else")
    while True:
        n -= 1
        if not n:
            break
    return out, n


@program
def nested_loops_unpacking():
    return [(i, j, k) for i, (j, k) in enumerate(zip("abc", [1, 2, 3])) for _ in range(2) if k != 2]


@program
def none_branches():
    out = []
    for v in (None, 0, 1, None):
        if v is None:
            out.append("n")
        elif v is not None and v:
            out.append("v")
        while v is not None:
            v = None
            out.append("w")
    return out


@program
def walrus():
    return [y for x in range(5) if (y := x * x) > 3], y


@program
def chained_assignment():
    a = b = c = []
    a.append(1)
    (d, e), *f = [(1, 2), 3, 4]
    g, (h, *i), j = 1, (2, 3, 4), 5
    [k, l] = "xy"
    return a, b is c, d, e, f, g, h, i, j, k, l


@program
def unpack_errors():
    def one():
        a, b = [1]

    def two():
        a, b = (1, 2, 3)

    def three():
        a, *b, c = [1]

    def four():
        a, b = 5

    def five():
        a, b = iter([1, 2, 3])

    return [caught(f) for f in (one, two, three, four, five)]


@program
def unbound_names():
    def local():
        if 0:
            x = 1
        return x

    def deleted():
        x = 1
        del x
        return x

    def free():
        def inner():
            return x

        inner()
        x = 1

    def glob():
        return not_defined_anywhere

    def cell():
        x = 1

        def inner():
            return x

        del x
        return inner()

    return [caught(f) for f in (local, deleted, free, glob, cell)]


@program
def slices():
    a = list(range(10))
    a[2:4] = [20, 30, 40]
    del a[0]
    del a[-2:]
    b = a[::2], a[1:], a[:3], a[:], a[-1], a[3:1:-1]
    a[::3] = [0] * len(a[::3])
    return a, b, "hello"[1:3], (1, 2, 3)[::-1]


@program
def displays():
    a, b = [1, 2], {"x": 1}
    return (
        [*a, 3, *a],
        (*a, *"ab"),
        {*a, 5},
        {**b, "y": 2, **{"x": 3}},
        {k: v for k, v in b.items()},
        {x for x in a},
        {1: 2, "a": [b]},
    )


@program
def formatting():
    x, w, s = 3.14159, 10, "it's"
    return (
        f"{x:.2f}|{s!r}|{s!s:>{w}}|{x!a}|{w:#x}|{{}}|{x=}|{s:^10}|"
        + "%s %d %r" % (s, w, s)
        + "{} {a[0]} {b.real:>4}".format(1, a=[2], b=3)
    )


@program
def constants():
    return 1, 1.5, 2j, "s", b"b", None, True, ..., (1, (2, "x")), frozenset({1})


@program
def globals_written():
    global WRITTEN
    WRITTEN = 5
    r = WRITTEN + 1
    del WRITTEN
    return r, "WRITTEN" in globals()


@program
def assertions():
    def bad(x):
        assert x > 0, f"bad {x}"
        return x

    return bad(1), caught(bad, -1)


# -- functions ---------------------------------------------------------------------------------


@program
def signatures():
    def f(a, b=2, /, c=3, *args, d, e=5, **kw):
        return a, b, c, args, d, e, kw

    calls = [
        lambda: f(1, d=4),
        lambda: f(1, 2, 3, 4, 5, d=6, z=7),
        lambda: f(),
        lambda: f(1),
        lambda: f(1, d=4, a=5),
        lambda: f(*[1, 2], **{"d": 1, "q": 2}),
        lambda: f(1, b=2, d=3),
        lambda: f(1, 2, c=9, d=0),
        lambda: f(1, 2, 3, c=9, d=0),
    ]
    return [caught(c) for c in calls]


@program
def binding_errors():
    def f(a, b): ...
    def g(*, k): ...
    def h(): ...
    def p(a, /): ...

    class C:
        def m(self, x): ...

    calls = [
        lambda: f(1),
        lambda: f(),
        lambda: f(1, 2, 3),
        lambda: f(1, c=2),
        lambda: f(1, a=2),
        lambda: g(),
        lambda: g(1),
        lambda: h(1),
        lambda: p(a=1),
        lambda: C().m(),
        lambda: C.m(1),
        lambda: C(1),
        lambda: f(*1),
        lambda: f(**1),
        lambda: f(**{1: 2}),
        lambda: f(1, **{"a": 1}),
        lambda: 5(),
        lambda: (lambda x: x)(),
        lambda: f(a=1, **{"a": 2}),
    ]
    return [caught(c) for c in calls]


@program
def defaults_are_shared():
    def f(x, acc=[]):
        acc.append(x)
        return acc

    f(1)
    return f(2), f(3, [0])


@program
def closures():
    def counter(n):
        def step(k=1):
            nonlocal n
            n += k
            return n

        def read():
            return n

        return step, read

    s, r = counter(5)
    s()
    s(10)
    fs = [lambda i=i: i for i in range(3)] + [lambda: i for i in range(3)]
    return r(), [f() for f in fs]


@program
def closure_over_argument():
    def f(a, *b, c=1, **d):
        def g():
            return a, b, c, d

        a += 1
        return g()

    return f(1, 2, 3, c=4, e=5)


@program
def recursion():
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def depth(n):
        return 0 if n == 0 else 1 + depth(n - 1)

    return fib(12), depth(150)


@program
def decorators():
    def twice(fn):
        @functools.wraps(fn)
        def inner(*a, **k):
            """inner doc"""
            return fn(*a, **k), fn(*a, **k)

        return inner

    def tag(name):
        def deco(fn):
            fn.tag = name
            return fn

        return deco

    @tag("t")
    @twice
    def f(x):
        """doc"""
        return x + 1

    return f(1), f.__name__, f.__doc__, f.tag, f.__wrapped__(5)


@program
def function_attributes():
    def f(a: int, b: "str" = "x", *, c: float = 1.0) -> list:
        "doc"

    f.extra = 3
    return (
        f.__name__,
        f.__qualname__,
        f.__doc__,
        f.__defaults__,
        f.__kwdefaults__,
        f.__annotations__,
        f.extra,
        f.__module__ == __name__,
    )


@program
def lambdas_and_builtins():
    return (
        list(map(lambda a, b: a * b, [1, 2, 3], [4, 5])), list(filter(None, [0, 1, "", "x"])), list(filter(lambda x: x > 1, range(4))),
        sorted("bca", reverse=True), sorted([(1, "b"), (0, "z")], key=lambda p: p[1]), max([3, 1, 2], key=lambda x: -x), min(4, 2, 8),
        max([], default=7), sum([1, 2, 3], 10), sum([[1], [2]], []), any(x > 2 for x in range(4)), all(x > 2 for x in range(4)),
        list(zip("ab", range(5), strict=False)), list(enumerate("ab", start=5)), list(reversed([1, 2, 3])), abs(-3), divmod(7, 2), pow(2, 10), pow(2, 10, 7),
        round(2.567, 2), len("abc"), list(iter([1, 2])), next(iter([]), "d"), ord("a"), chr(98), hex(255), bin(3), isinstance(3, (str, int)),
    )  # fmt: skip


@program
def builtin_errors():
    calls = [
        lambda: max([]), lambda: min(), lambda: next(iter([])), lambda: list(zip([1], [1, 2], strict=True)), lambda: list(zip([1, 2], [1], strict=True)),
        lambda: len(5), lambda: sum(["a"]), lambda: int("x"), lambda: iter(5), lambda: sorted([1, "a"]), lambda: getattr(5, "nope"), lambda: {}["k"],
        lambda: [][1], lambda: 1 + "a", lambda: -"a", lambda: 1 < "a", lambda: "a" in 5, lambda: functools.reduce(operator.add, []), lambda: enumerate(), lambda: map(len),
        lambda: isinstance(1, 5), lambda: sorted([1], foo=1), lambda: reversed({1}), lambda: next(5),
    ]  # fmt: skip
    return [caught(c) for c in calls]


@program
def partials_and_operators():
    def f(*a, **k):
        return a, k

    p = functools.partial(functools.partial(f, 1, x=2), 3, y=4)
    d = {"a": {"b": 5}}
    return (
        p(9, x=7), p.args, p.keywords, functools.reduce(lambda a, b: a * b, range(1, 6)), functools.reduce(lambda a, b: a + b, "abc", "z"),
        operator.itemgetter(1)([5, 6]), operator.itemgetter("a", "c")({"a": 1, "c": 2}), operator.attrgetter("real", "imag")(3 + 4j),
        operator.attrgetter("x.real")(types.SimpleNamespace(x=5)), operator.methodcaller("split", ",", maxsplit=1)("a,b,c"), operator.methodcaller("upper")("a"), operator.add(1, 2), operator.getitem(d, "a"),
        operator.not_([]), operator.contains([1], 1), operator.iadd([1], [2]),
    )  # fmt: skip


@program
def itertools_over_generators():
    def g(n):
        yield from range(n)

    it = itertools
    return (
        list(it.chain(g(2), [5], g(1))), list(it.chain.from_iterable(g(i) for i in range(3))), list(it.islice(g(10), 2, 8, 2)), list(it.accumulate(g(5), lambda a, b: a + 2 * b)),
        list(it.takewhile(lambda x: x < 3, g(9))), list(it.dropwhile(lambda x: x < 3, g(5))), [(k, list(v)) for k, v in it.groupby(g(6), key=lambda x: x // 2)],
        list(it.starmap(lambda a, b: a - b, [(3, 1), (2, 5)])), list(it.product(g(2), repeat=2)), list(it.zip_longest(g(2), g(3), fillvalue="-")), list(it.permutations(g(3), 2)),
        list(it.combinations(g(3), 2)), [list(t) for t in it.tee(g(3))], list(it.filterfalse(lambda x: x % 2, g(5))), list(it.pairwise(g(4))), list(it.repeat(1, 2)), list(it.islice(it.count(3), 2)), list(it.compress(g(4), [1, 0, 1, 1])),
    )  # fmt: skip


@program
def lru_cache():
    @functools.lru_cache(maxsize=None)
    def f(n):
        return n * 2

    @functools.cache
    def g(n):
        return 1 if n < 2 else n * g(n - 1)

    return f(2), f(2), g(10)


@program
def singledispatch():
    @functools.singledispatch
    def f(x):
        return "object"

    @f.register
    def _(x: int):
        return "int"

    @f.register(list)
    def _(x):
        return "list"

    return f(1), f([]), f("s"), f(True)


@program
def callable_objects():
    class Add:
        def __init__(self, n):
            self.n = n

        def __call__(self, x, *, y=0):
            return self.n + x + y

    a = Add(3)
    return a(1), a(1, y=5), list(map(a, [1, 2])), callable(a), functools.partial(a, y=1)(1)


@program
def locals_and_vars():
    a, b = 1, 2
    names = sorted(locals())

    def inner(x):
        a
        return sorted(locals().items())

    return names, inner(5), sorted(vars(types.SimpleNamespace(q=1)).items())


@program
def exec_free_introspection():
    def f(a, b=1, *c, **d): ...

    s = inspect.signature(f)
    return str(s), list(s.parameters), inspect.isfunction(f), f.__code__.co_varnames


# -- classes -----------------------------------------------------------------------------------


@program
def inheritance_and_super():
    class A:
        k = 1

        def __init__(self, x):
            self.x = x

        def f(self):
            return ["A", self.x]

        @classmethod
        def make(cls, x):
            return cls(x)

        @staticmethod
        def s(v):
            return v * 2

    class B(A):
        def f(self):
            return ["B", *super().f()]

        @classmethod
        def make(cls, x):
            return super().make(x + 1)

    class C(A):
        def f(self):
            return ["C", *super(C, self).f()]

    class D(B, C):
        def __init__(self, *a):
            super().__init__(*a)
            self.d = [super(D, self).k for _ in "a"]

    d = D.make(3)
    return (
        d.f(),
        d.d,
        d.s(4),
        D.s(5),
        type(d).__name__,
        [c.__name__ for c in D.__mro__],
        D.k,
        isinstance(d, C),
        issubclass(D, A),
        d.make(1).x,
    )


@program
def properties_and_descriptors():
    class Typed:
        def __set_name__(self, owner, name):
            self.name = "_" + name

        def __get__(self, obj, owner=None):
            return self if obj is None else getattr(obj, self.name, "unset")

        def __set__(self, obj, value):
            if not isinstance(value, int):
                raise TypeError(f"{self.name} wants int")
            setattr(obj, self.name, value)

        def __delete__(self, obj):
            delattr(obj, self.name)

    class NonData:
        def __get__(self, obj, owner=None):
            return "nondata"

    class A:
        t = Typed()
        n = NonData()

        def __init__(self):
            self._p = 1

        @property
        def p(self):
            "doc p"
            return self._p

        @p.setter
        def p(self, v):
            self._p = v * 2

        @p.deleter
        def p(self):
            del self._p

        @property
        def ro(self):
            return 5

        @functools.cached_property
        def c(self):
            self.count = getattr(self, "count", 0) + 1
            return self.count

    a = A()
    out = [a.t, a.n, a.p, a.c, a.c]
    a.t = 5
    a.p = 4
    a.__dict__["n"] = "own"
    out += [a.t, a.p, a.n, caught(setattr, a, "t", "x"), caught(setattr, a, "ro", 1), A.p.__doc__]
    del a.t, a.p
    out += [a.t, caught(lambda: a.p), isinstance(A.t, Typed), caught(delattr, a, "ro"), caught(delattr, a, "zz")]
    return out


@program
def attribute_hooks():
    class A:
        def __init__(self):
            self.log = []

        def __getattr__(self, name):
            if name.startswith("x"):
                return name * 2
            raise AttributeError(name)

        def __setattr__(self, name, value):
            if name != "log":
                self.log.append(("set", name))
            super().__setattr__(name, value)

        def __delattr__(self, name):
            self.log.append(("del", name))
            object.__delattr__(self, name)

        @property
        def broken(self):
            raise AttributeError("inside")

    class B:
        def __getattribute__(self, name):
            if name == "magic":
                return 42
            return object.__getattribute__(self, name)

        def __getattr__(self, name):
            return "fallback " + name

    a, b = A(), B()
    a.q = 1
    del a.q
    b.y = 3
    return (
        a.log,
        a.xa,
        caught(lambda: a.nope),
        getattr(a, "nope", 5),
        hasattr(a, "xq"),
        hasattr(a, "nope"),
        caught(lambda: a.broken),
        b.magic,
        b.y,
        b.z,
    )


@program
def operator_overloading():
    class V:
        def __init__(self, x):
            self.x = x

        def __add__(self, o):
            return V(self.x + (o.x if isinstance(o, V) else o)) if isinstance(o, (V, int)) else NotImplemented

        __radd__ = __add__

        def __iadd__(self, o):
            self.x += 100
            return self

        def __neg__(self):
            return V(-self.x)

        def __eq__(self, o):
            return isinstance(o, V) and self.x == o.x

        def __lt__(self, o):
            return self.x < o.x

        def __hash__(self):
            return hash(self.x)

        def __bool__(self):
            return self.x != 0

        def __repr__(self):
            return f"V({self.x})"

        def __matmul__(self, o):
            return "mm"

        def __rpow__(self, o):
            return ("rpow", o)

        def __abs__(self):
            return V(abs(self.x))

        def __round__(self, n=None):
            return ("round", n)

        def __divmod__(self, o):
            return ("dm", o)

    class W(V):
        def __radd__(self, o):
            return ("W.radd", o.x)

    a = V(1)
    a += 5
    return (
        repr(V(1) + V(2)), repr(V(1) + 5), repr(5 + V(1)), caught(lambda: V(1) + "s"), caught(lambda: "s" - V(1)), repr(a), repr(-V(3)), V(1) == V(1), V(1) != V(1), V(1) != V(2), V(1) < V(2), V(2) > V(1),
        caught(lambda: V(1) <= V(2)), bool(V(0)), not V(0), "t" if V(1) else "f", V(1) @ 2, 3 ** V(1), V(1) + W(2), repr(abs(V(-2))), round(V(1)), round(V(1), 2), divmod(V(1), 3),
        sorted([V(3), V(1), V(2)], key=lambda v: v)[0].x, [v.x for v in sorted([V(3), V(1)])], max(V(1), V(5)).x, {V(1): "a"}[V(1)], V(1) in [V(1)], repr(sum([V(1), V(2)], V(0))), V(1) == 1,
    )  # fmt: skip


@program
def container_protocols():
    class Seq:
        def __init__(self, *v):
            self.v = list(v)

        def __len__(self):
            return len(self.v)

        def __getitem__(self, i):
            if isinstance(i, slice):
                return ("slice", i.start, i.stop, i.step)
            return self.v[i]

        def __setitem__(self, i, x):
            self.v[i] = x

        def __delitem__(self, i):
            del self.v[i]

    class It:
        def __init__(self, n):
            self.n = n

        def __iter__(self):
            return self

        def __next__(self):
            if self.n == 0:
                raise StopIteration
            self.n -= 1
            return self.n

    class Has:
        def __contains__(self, x):
            return x == 5

    class Map:
        def keys(self):
            return ["a", "b"]

        def __getitem__(self, k):
            return k * 2

    s = Seq(1, 2, 3)
    s[0] = 9
    del s[1]
    f = lambda *a, **k: (a, k)
    return (
        s[0], s[1:5], len(s), list(s), 3 in s, 4 in s, bool(Seq()), [*s], tuple(It(3)), list(zip(It(3), s)), max(It(4)), 2 in It(3), 5 in Has(), 4 in Has(), dict(Map()), {**Map()}, f(*It(2), **Map()), list(reversed(s)),
        next(It(2)), sum(It(4)), set(It(3)) == {0, 1, 2}, "".join(str(x) for x in It(3)), ",".join(map(str, s)), sorted(It(3)), list(map(lambda x: x + 1, It(3))), caught(lambda: Seq()[0]), caught(lambda: iter(Has())),
    )  # fmt: skip


@program
def new_and_metaclasses():
    class Meta(type):
        def __new__(m, name, bases, ns, **kw):
            ns["made"] = sorted(k for k in ns if not k.startswith("__"))
            ns["kw"] = kw
            return super().__new__(m, name, bases, ns)

        def __init__(cls, name, bases, ns, **kw):
            super().__init__(name, bases, ns)

        def __call__(cls, *a, **k):
            obj = super().__call__(*a, **k)
            obj.called = True
            return obj

        @property
        def mp(cls):
            return cls.__name__ + "!"

        def __getattr__(cls, name):
            if name.startswith("zz"):
                return name
            raise AttributeError(name)

        def __len__(cls):
            return 77

        def __getitem__(cls, k):
            return ("meta", k)

        def __instancecheck__(cls, obj):
            return obj == 5

    class A(metaclass=Meta, flag=1):
        x = 1

        def __new__(cls, v):
            self = super().__new__(cls)
            self.new = v
            return self

        def __init__(self, v):
            self.init = v

    class Sub:
        subs = []

        def __init_subclass__(cls, tag=None, **kw):
            super().__init_subclass__(**kw)
            Sub.subs.append((cls.__name__, tag))

    class S1(Sub, tag="t"):
        pass

    class Other:
        def __new__(cls):
            return 5

    class T(tuple):
        def __new__(cls, a, b):
            return super().__new__(cls, (a, b))

        @property
        def first(self):
            return self[0]

    a = A(3)
    return (
        a.new,
        a.init,
        a.called,
        A.made,
        A.kw,
        A.mp,
        A.zz1,
        caught(lambda: A.qq),
        len(A),
        A[3],
        isinstance(5, A),
        isinstance(6, A),
        Sub.subs,
        Other(),
        T(1, 2).first,
        T(1, 2),
    )


@program
def class_features():
    class A:
        __slots__ = ("a", "b")
        z = [i for i in range(3)]
        w: int = 5
        u: "str"

        def __init__(self):
            self.a = 1

        def __class_getitem__(cls, k):
            return ("cgi", k)

    x = 10

    class B:
        y = x

        def m(self):
            return __class__.__name__

        locals()["dyn"] = 4

    a = A()
    return (
        a.a,
        caught(lambda: a.b),
        caught(lambda: setattr(a, "c", 1)),
        A.z,
        A.__annotations__,
        A[int],
        B.y,
        B().m(),
        B.dyn,
        A.__qualname__,
        hasattr(a, "__dict__"),
    )


@program
def dataclasses_program():
    @dataclasses.dataclass(order=True)
    class P:
        x: int
        y: float = 2.0
        z: list = dataclasses.field(default_factory=list, compare=False)

        def __post_init__(self):
            self.z.append(self.x)

    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class F:
        a: int
        b: str = "b"

    p = P(1)
    return (
        repr(p),
        p == P(1),
        p < P(2),
        dataclasses.asdict(p),
        dataclasses.replace(p, y=5).y,
        repr(F(a=1)),
        caught(setattr, F(a=1), "a", 2),
        hash(F(a=1)) == hash(F(a=1)),
        caught(F),
        [f.name for f in dataclasses.fields(P)],
    )


@program
def enums():
    class Color(enum.Enum):
        RED = 1
        GREEN = "g"

        @property
        def low(self):
            return self.name.lower()

    class Flag(enum.IntFlag):
        A = 1
        B = 2

    return (
        Color.RED.value,
        Color("g").name,
        Color["RED"] is Color.RED,
        [c.low for c in Color],
        Color.RED == Color.GREEN,
        Color.RED in Color,
        (Flag.A | Flag.B).value,
        caught(lambda: Color(5)),
        repr(Color.RED),
        {Color.RED: 1}[Color.RED],
    )


@program
def namedtuples_and_collections():
    P = collections.namedtuple("P", "x y", defaults=[5])

    class Q(typing.NamedTuple):
        a: int
        b: str = "z"

        def double(self):
            return self.a * 2

    dd = collections.defaultdict(list)
    dd["a"].append(1)
    od = collections.OrderedDict([("x", 1), ("y", 2)])
    od.move_to_end("x")
    c = collections.Counter("abca")
    dq = collections.deque([1, 2, 3], maxlen=2)
    cm = collections.ChainMap({"a": 1}, {"a": 2, "b": 3})
    return (
        P(1),
        P(1, 2)._replace(x=9),
        P(1)._asdict(),
        Q(2).double(),
        Q(1) == (1, "z"),
        dict(dd),
        list(od),
        c.most_common(1),
        c["zz"],
        list(dq),
        cm["a"],
        cm["b"],
        [*P(1, 2)],
        sorted(cm),
    )


@program
def subclassed_builtins():
    class L(list):
        def append(self, x):
            super().append(x * 2)

        def __getitem__(self, i):
            return ("L", super().__getitem__(i))

    class D(dict):
        def __missing__(self, k):
            return "missing " + k

        def __setitem__(self, k, v):
            super().__setitem__(k, v + 1)

    class S(str):
        def shout(self):
            return self.upper() + "!"

    class I(int):
        def __add__(self, o):
            return I(super().__add__(o) + 1)

    l, d = L([1]), D(a=1)
    l.append(5)
    d["b"] = 1
    return (
        list(l),
        l[0],
        d["a"],
        d["b"],
        d["zz"],
        d.get("zz"),
        S("a").shout(),
        I(1) + 2,
        type(I(1) + 2).__name__,
        len(l),
        {**d},
        l == [1, 10],
        f"{S('q')}",
    )


@program
def abstract_and_protocols():
    class Base(abc.ABC):
        @abc.abstractmethod
        def f(self): ...

        @property
        @abc.abstractmethod
        def p(self): ...

    class Impl(Base):
        def f(self):
            return 1

        @property
        def p(self):
            return 2

    class Sized:
        def __len__(self):
            return 1

    @typing.runtime_checkable
    class Proto(typing.Protocol):
        def f(self): ...

    T = typing.TypeVar("T")

    class G(typing.Generic[T]):
        def get(self, x: T) -> T:
            return x

    return (
        caught(Base),
        Impl().f(),
        Impl().p,
        isinstance(Sized(), collections.abc.Sized),
        isinstance(Impl(), Proto),
        isinstance(3, Proto),
        G[int]().get(4),
        isinstance([], collections.abc.Sequence),
        isinstance((x for x in ()), collections.abc.Iterator),
    )


@program
def copies():
    class A:
        def __init__(self):
            self.x = [1]

        def __copy__(self):
            a = A()
            a.x = "copied"
            return a

    class B:
        def __init__(self):
            self.x = [1]

    b = B()
    b2, b3 = copy.copy(b), copy.deepcopy(b)
    return copy.copy(A()).x, b2.x is b.x, b3.x is b.x, b3.x, copy.copy([1]), copy.deepcopy({"a": [1]})


@program
def context_variables_of_text():
    class A:
        def __str__(self):
            return "str"

        def __repr__(self):
            return "repr"

        def __format__(self, spec):
            return "fmt:" + spec

        x = 3

    class B:
        def __repr__(self):
            return "B!"

        def __len__(self):
            return -1

        def __index__(self):
            return 2

        def __int__(self):
            return "no"

    a, b = A(), B()
    return (
        str(a),
        repr(a),
        f"{a}",
        f"{a!r:>6}",
        f"{a:q}",
        "{0} {0!r} {0.x} {0:z}".format(a),
        str(b),
        f"{b}",
        "%s %r" % (a, a),
        [10, 20, 30][b],
        caught(len, b),
        caught(int, b),
        "a" * b,
        string.Template("$x y").substitute(x=1),
        re.sub("a+", lambda m: str(len(m[0])), "baab"),
    )


@program
def text_of_what_is_no_mapping():
    class Shown:
        x = 3

        def __repr__(self):
            return "shown"

    class Mapping(Shown):
        def __getitem__(self, key):
            return key * 2

    class Number(Shown):
        def __index__(self):
            return 7

    formats = ("", "%s", "%(a)s", "%d", "%s %s")
    values = (Shown(), Mapping(), Number(), [Shown()], {"a": Shown()}, (Shown(), Mapping()), None)
    found = [caught(lambda: text % value) for text in formats for value in values]
    return found, "{0.x} {0[a]} {0}".format(Mapping()), caught("{0[a]}".format, Shown())


# -- exceptions and with -----------------------------------------------------------------------


@program
def try_forms():
    log = []

    def f(k):
        try:
            log.append("try")
            if k == 1:
                raise ValueError("v")
            if k == 2:
                return "ret"
            if k == 3:
                raise KeyError("k")
        except ValueError as e:
            log.append(("exc", str(e)))
            return "handled"
        except (TypeError, IndexError):
            log.append("never")
        else:
            log.append("else")
        finally:
            log.append("finally")
        return "end"

    return [caught(f, k) for k in range(4)], log


@program
def finally_overrides():
    def a():
        try:
            raise ValueError
        finally:
            return 1

    def b():
        for i in range(3):
            try:
                continue
            finally:
                if i == 1:
                    break
        return i

    def c():
        try:
            return "a"
        finally:
            try:
                raise KeyError
            except KeyError:
                pass

    def d():
        while True:
            try:
                break
            finally:
                x = 5
        return x

    return a(), b(), c(), d()


@program
def exception_chains():
    def chain(e):
        out = []
        while e is not None:
            out.append((type(e).__name__, str(e), type(e.__cause__).__name__, e.__suppress_context__))
            e = e.__cause__ or e.__context__
        return out

    def one():
        try:
            1 / 0
        except ZeroDivisionError as e:
            raise KeyError("k") from e

    def two():
        try:
            {}["x"]
        except KeyError:
            raise ValueError("during")

    def three():
        try:
            [][0]
        except IndexError:
            raise RuntimeError("none") from None

    def four():
        try:
            try:
                raise ValueError(1)
            finally:
                raise KeyError(2)
        except KeyError as e:
            raise

    def helper():
        raise OSError("deep")

    def five():
        try:
            raise ValueError("outer")
        except ValueError:
            try:
                helper()
            except OSError as e:
                return chain(e)

    def six():
        try:
            raise ValueError("a")
        except ValueError as e:
            try:
                raise e
            except ValueError as e2:
                return chain(e2)

    out = []
    for f in (one, two, three, four):
        try:
            f()
        except Exception as e:
            out.append(chain(e))
    return out, five(), six()


@program
def raising():
    class E(Exception):
        def __init__(self, a, b=2):
            super().__init__(a)
            self.b = b

        def __str__(self):
            return f"E{self.args}{self.b}"

    def bare():
        raise

    def cls():
        raise E

    def notexc():
        raise 5

    def badcause():
        raise E(1) from 5

    def badexcept():
        try:
            raise E(1)
        except 5:
            pass

    def reraise():
        try:
            raise E(3)
        except Exception:
            raise

    def named_deleted():
        try:
            raise E(1)
        except E as e:
            pass
        return e

    def notes():
        try:
            raise E(1)
        except E as e:
            e.add_note("n")
            return e.__notes__

    return [caught(f) for f in (bare, cls, notexc, badcause, badexcept, reraise, named_deleted, notes)]


@program
def exc_info_states():
    out = []

    def info():
        return sys.exc_info()[0]

    try:
        raise ValueError
    except ValueError:
        out.append(info())
        try:
            raise KeyError
        except KeyError:
            out.append(info())
        out.append(info())

        def g():
            yield sys.exc_info()[0]
            try:
                raise IndexError
            except IndexError:
                yield sys.exc_info()[0]
            yield sys.exc_info()[0]

        it = g()
        out.append(next(it))
    out.append(info())
    out += list(it)
    out.append(info())
    return out


@program
def with_forms():
    log = []

    class CM:
        def __init__(self, name, swallow=False):
            self.name, self.swallow = name, swallow

        def __enter__(self):
            log.append(("in", self.name))
            return self.name

        def __exit__(self, t, v, tb):
            log.append(("out", self.name, t and t.__name__, str(v)))
            return self.swallow

    with CM("a") as a, CM("b"):
        log.append(a)
    with CM("c", True):
        raise ValueError("x")
    try:
        with CM("d"):
            with CM("e"):
                raise KeyError("y")
    except KeyError:
        log.append("caught")

    def f():
        with CM("r"):
            return "value"

    def g():
        for i in range(3):
            with CM(i):
                if i == 1:
                    break
                continue
        return i

    class NoExit:
        def __enter__(self):
            pass

    def h():
        with NoExit():
            pass

    def k():
        with 5:
            pass

    return f(), g(), caught(h), caught(k), log


@program
def contextlib_forms():
    log = []

    @contextlib.contextmanager
    def cm(name, swallow=False):
        log.append("in " + name)
        try:
            yield name
        except ValueError:
            log.append("caught " + name)
            if not swallow:
                raise
        finally:
            log.append("out " + name)

    with cm("a"):
        pass
    with cm("b", True):
        raise ValueError
    r = caught(lambda: [x for _ in [0] for x in [cm("c").__enter__()]])
    with contextlib.suppress(KeyError, IndexError):
        {}["x"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(cm("s1"))
        stack.enter_context(cm("s2"))
        stack.callback(log.append, "cb")
    with contextlib.nullcontext(5) as five:
        pass

    @cm("deco")
    def f():
        return "f"

    def fails():
        with cm("d"):
            raise ValueError("out")

    def other():
        with cm("e"):
            raise KeyError("through")

    def stop():
        with cm("g"):
            raise StopIteration("s")

    return r, five, f(), f(), caught(fails), caught(other), caught(stop), log


@program
def stop_iteration_in_generators():
    def g():
        yield 1
        raise StopIteration(5)

    def h():
        yield next(iter([]))

    return caught(list, g()), caught(list, h())


# -- generators --------------------------------------------------------------------------------


@program
def generator_protocol():
    log = []

    def g(n):
        try:
            while n:
                got = yield n
                log.append(got)
                n -= 1
            return "done"
        except ValueError as e:
            log.append(str(e))
            yield "after throw"
        finally:
            log.append("closed")

    a = g(3)
    out = [next(a), a.send("x"), a.throw(ValueError("t")), caught(next, a), caught(next, a)]
    b = g(2)
    next(b)
    b.close()
    b.close()
    c = g(1)
    caught(c.send, 5)
    d = g(1)
    next(d)
    try:
        next(d)
    except StopIteration as s:
        out.append(s.value)
    e = g(5)
    out += [
        caught(c.send, 1),
        caught(e.throw, KeyError("k")),
        caught(next, e),
        inspect.isgenerator(e),
        isinstance(e, types.GeneratorType),
        type(e).__name__,
        iter(e) is e,
    ]
    return out, log


@program
def yield_from():
    log = []

    def inner():
        try:
            x = yield 1
            log.append(x)
            y = yield 2
            log.append(y)
        except KeyError:
            log.append("inner key")
            yield "k"
        finally:
            log.append("inner fin")
        return "r"

    def outer():
        try:
            r = yield from inner()
            log.append(r)
            yield from [7, 8]
            yield from range(2)
        except ValueError:
            yield "outer value"
        finally:
            log.append("outer fin")

    a = outer()
    out = [next(a), a.send("s"), a.send("t"), next(a), list(a)]
    b = outer()
    out += [next(b), b.throw(KeyError), next(b), b.throw(ValueError), list(b)]
    c = outer()
    next(c)
    c.close()
    d = outer()
    next(d)
    next(d)
    next(d)
    out.append(caught(d.throw, ValueError))

    def ignores():
        for _ in range(2):
            try:
                yield 1
            except GeneratorExit:
                pass

    i = ignores()
    next(i)
    ignored = caught(i.close)
    i.close()
    return out, ignored, log


@program
def generator_pipelines():
    def numbers():
        n = 0
        while True:
            yield n
            n += 1

    def squares(xs):
        for x in xs:
            yield x * x

    def take(n, xs):
        return [x for _, x in zip(range(n), xs)]

    def tree(n):
        if n:
            yield from tree(n - 1)
            yield n
            yield from tree(n - 1)

    e = (x for x in range(3))
    return (
        take(5, squares(numbers())),
        list(tree(4)),
        sum(x for x in range(5)),
        next(e),
        list(e),
        dict((k, v) for k, v in [(1, 2)]),
        [*(y for y in "ab")],
        tuple(x for x in range(2)),
        max(x for x in [3, 9]),
        {x for x in range(2)},
        "".join(c for c in "xyz"),
        sorted(x for x in (2, 1)),
        any(x for x in [0, 1]),
        list(zip((x for x in "ab"), (y for y in "cd"))),
    )


@program
def generator_reentry_and_scope():
    def g():
        yield next(it)

    it = g()
    r = caught(next, it)

    def lazy():
        x = 1
        gen = (x + i for i in range(2))
        x = 10
        return list(gen)

    def acc():
        total = 0
        while True:
            total += yield total

    a = acc()
    next(a)
    return r, lazy(), [a.send(i) for i in (1, 2, 3)]


@program
def iterators_state():
    l = [1, 2, 3]
    it = iter(l)
    out = [next(it)]
    l.append(4)
    out += list(it)
    l.append(5)
    out += list(it)
    d = {1: 2, 3: 4}
    z = zip(l, d)
    out += [next(z), list(z), list(enumerate(d.items(), 1)), list(map(str, d.values()))]

    def grow():
        for k in d:
            d[k + 10] = 1

    it2 = iter(range(5))
    pairs = list(zip(it2, it2))
    sent = iter([1, 2, 0, 3]).__next__
    out += [caught(grow), pairs, list(iter(sent, 0)), type(iter([])).__name__, type(map(len, [])).__name__]
    return out


# -- comprehensions, matching ------------------------------------------------------------------


@program
def comprehension_scopes():
    x = "outer"
    a = [x for x in range(3)]
    fs = [lambda: (x, y) for y in range(2)]
    nested = [[(i, j) for j in range(i)] for i in range(3)]

    class C:
        k = 5
        v = [i for i in range(k)]

    def f(n):
        return {i: [j + n for j in range(i)] for i in range(3)}

    return a, x, [f() for f in fs], nested, C.v, f(2), [x for x in [1, 2] for x in [x, x * 10]]


@program
def matching():
    @dataclasses.dataclass
    class P:
        x: int
        y: int

    class Q:
        __match_args__ = ("a",)

        def __init__(self, a):
            self.a = a

    def m(v):
        match v:
            case 0 | 1:
                return "small"
            case int(n) if n > 100:
                return ("big", n)
            case str() as s:
                return ("str", s)
            case [1, *rest]:
                return ("list1", rest)
            case [a, b]:
                return ("pair", a, b)
            case {"k": val, **others}:
                return ("map", val, others)
            case P(x=0, y=y):
                return ("P0", y)
            case P(x, y):
                return ("P", x, y)
            case Q(a):
                return ("Q", a)
            case None:
                return "none"
            case [[p, q], *_, last]:
                return (p, q, last)
            case _:
                return "other"

    return [
        m(v)
        for v in (
            0,
            500,
            "s",
            [1, 2, 3],
            (4, 5),
            {"k": 1, "z": 2},
            {"q": 1},
            P(0, 5),
            P(1, 2),
            Q(7),
            None,
            50,
            [[1, 2], 3, 4],
            2.5,
            [],
        )
    ]


@program
def match_errors():
    class A:
        __match_args__ = ("x",)

    class B:
        __match_args__ = ["x"]

    def one():
        match A():
            case A(1, 2):
                pass

    def two():
        match 5:
            case int(1, 2):
                pass

    def three():
        match B():
            case B(1):
                pass

    def four():
        match A():
            case A(x):
                return 1
        return 2

    return [caught(f) for f in (one, two, three, four)]


@program
def imports():
    import math as m
    import os.path
    from collections import OrderedDict as OD
    from math import pi, sqrt

    def bad():
        from math import nope

    def worse():
        import no_such_module_x

    return (
        m.floor(2.5),
        os.path.join("a", "b"),
        OD is collections.OrderedDict,
        sqrt(4),
        pi == math.pi,
        caught(bad)[0],
        caught(worse),
    )


@program
def coroutines_are_made():
    async def f():
        return 1

    c = f()
    try:
        c.send(None)
    except StopIteration as s:
        return s.value


@program
def deep_calls():
    class Node:
        def __init__(self, child):
            self.child = child

        def __call__(self, x):
            return self.forward(x)

        def forward(self, x):
            return x + 1 if self.child is None else self.child(x)

    n = None
    for _ in range(100):
        n = Node(n)
    return n(1)


@program
def module_like():
    class Module:
        def __init__(self):
            self.__dict__["_modules"] = {}
            self.__dict__["_params"] = {}

        def __setattr__(self, name, value):
            store = (
                self._modules
                if isinstance(value, Module)
                else self._params
                if isinstance(value, float)
                else self.__dict__
            )
            store[name] = value

        def __getattr__(self, name):
            for store in ("_params", "_modules"):
                if name in self.__dict__[store]:
                    return self.__dict__[store][name]
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

        def __call__(self, *args, **kwargs):
            return self.forward(*args, **kwargs)

        def parameters(self):
            yield from self._params.values()
            for m in self._modules.values():
                yield from m.parameters()

    class Linear(Module):
        def __init__(self, w):
            super().__init__()
            self.w = w

        def forward(self, x):
            return x * self.w

    class Net(Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Linear(2.0), Linear(3.0)
            self.n = 4

        def forward(self, x, *, scale=1.0):
            x = self.a(x)
            for _ in range(self.n):
                x = self.b(x) + scale
            return x

    net = Net()
    return net(1.0), net(2.0, scale=0.5), list(net.parameters()), caught(lambda: net.zzz)


@program
def sequences_meet_reflected_methods():
    class R:
        def __radd__(self, o):
            return ("radd", o)

        def __rmul__(self, o):
            return NotImplemented

    l = [1]
    l += R()
    k = [1]

    def times():
        return [1] * R()

    def other():
        return "a" + object()

    k += (x for x in "ab")
    return "s" + R(), (1,) + R(), l, k, caught(times), caught(other)


def shape(error):
    if isinstance(error, BaseExceptionGroup):
        return type(error).__name__, error.message, [shape(part) for part in error.exceptions]
    return type(error).__name__, error.args


def star(raised):
    """What clauses take of an exception, in turn, and what is left."""
    log = []
    try:
        try:
            if raised is not None:
                raise raised
        except* (KeyError, IndexError) as group:
            log.append(("lookup", shape(group), shape(sys.exc_info()[1])))
        except* ValueError as group:
            log.append(("value", shape(group)))
            if "again" in str(group.exceptions[0]):
                raise
            if "named" in str(group.exceptions[0]):
                raise group
            if "other" in str(group.exceptions[0]):
                raise OSError("raised by a clause") from group
        except* TypeError:
            log.append("type")
        else:
            log.append("else")
        finally:
            log.append("finally")
    except BaseException as error:
        log.append(("left", shape(error), shape(error.__context__) if error.__context__ else None))
    return log, sys.exc_info()


@program
def exception_groups_by_clauses():
    group = ExceptionGroup
    nested = group("n", [KeyError("k"), group("m", [ValueError("v"), TypeError("t")]), OSError("o")])
    return [
        star(raised)
        for raised in (
            None, KeyError("k"), ValueError("v"), OSError("o"), ValueError("again"), ValueError("other"), nested,
            group("a", [ValueError("again"), OSError("o"), KeyError("k")]),
            group("b", [ValueError("other"), ValueError("v"), OSError("o")]),
            group("c", [ValueError("named"), OSError("o")]),
            group("d", [ValueError("v"), group("e", [ValueError("named"), TypeError("t")]), OSError("o")]),
            group("c", [group("d", [ValueError("again")]), TypeError("t"), group("e", [OSError("o"), KeyError("k")])]),
        )
    ]  # fmt: skip


@program
def exception_groups_of_no_class():
    def wrong():
        try:
            raise ValueError("v")
        except* ExceptionGroup:
            pass

    def in_loops():
        found = []
        for i in range(3):
            try:
                if i == 1:
                    raise ExceptionGroup("g", [ValueError(i), KeyError(i)])
            except* ValueError as e:
                found.append((i, shape(e)))
            except* KeyError:
                found.append(i)
        return found

    return caught(wrong), in_loops()
