# ruff: noqa: E701, E702, E741, F841, PLW1641, RUF012, UP031, C416, B905, PLW0603, PLC3002, PLR0124, B008, B023, B009, B012
# ruff: noqa: PLE0643, B904, RUF023, B007, RUF059, PIE804, PLC0415 - programs as people write them
"""Denser programs that ask objects about themselves, copy them, and go around in loops."""

from __future__ import annotations

import copy
import inspect

import pytest
from world_cases import Case, case, cases_of, check


class Held:
    k = 1

    def __init__(self):
        self.a = 1
        self.l = [1]


class HeldInSlots:
    __slots__ = ("a", "l")

    def __init__(self):
        self.a = 1
        self.l = [1]


@case(Held)
def dirs(x, o):
    n = [d for d in dir(o) if not d.startswith("_")]
    setattr(o, "n%d" % len(n), 1)
    return x + 1, n, [d for d in dir(o) if not d.startswith("_")]


@case(Held)
def dir2(x, o):
    return x + 1, len(dir(o))


@case(Held)
def varss(x, o):
    o.a += 1
    v = dict(vars(o))
    vars(o)["z"] = len(v)
    return x * o.a, v, o.__dict__.keys(), "a" in o.__dict__, len(o.__dict__), list(vars(o).items())


@case(Held)
def copyobj(x, o):
    o.a += 1
    o.l.append(o.a)
    c = copy.copy(o)
    d = copy.deepcopy(o)
    c.a = 100
    d.l.append(5)
    return x * o.a, vars(c), vars(d), c.l is o.l


@case(HeldInSlots)
def copyslots(x, o):
    o.a += 1
    o.l.append(o.a)
    c = copy.copy(o)
    d = copy.deepcopy(o)
    return x * o.a, c.a, d.a, d.l, c.l is o.l


@case(Held)
def members(x, o):
    o.a += 1
    return x * o.a, [m for m in inspect.getmembers(o) if not m[0].startswith("_")], inspect.ismethod(o.__init__)


@case(Held)
def classdict(x, o):
    T = type(o)
    return (
        x + 1,
        "k" in T.__dict__,
        T.__dict__["k"],
        vars(T)["k"],
        T.__name__,
        sorted(k for k in vars(T) if k[0] != "_"),
    )


@case(lambda: [0])
def localsglobals(x, s):
    a = 1
    s[0] += 1
    d = locals()
    return x + 1, sorted(d), d["a"], "torch" in globals(), globals()["__name__"]


class Ev(dict):
    @property
    def total(self):
        return sum(self.values())


@case(lambda: Ev(a=1, b=2))
def dprop(x, d):
    d["c"] = d.total
    return x * d.total, len(d), sum(d.values()), max(d.values()), list(map(lambda k: d[k], d))


@case(lambda: [3, 1, 2])
def listops(x, l):
    l[1:2] = [7, 8]
    del l[0]
    l *= 2
    l += [1]
    l.insert(0, l.pop())
    l.reverse()
    m = l[::-1]
    m.remove(7)
    l[::2] = [0] * len(l[::2])
    c = l.copy()
    c.clear()
    n = l + [9]
    e = l == m
    i = l.index(8) if 8 in l else -1
    return (
        x * len(l),
        m,
        c,
        n,
        e,
        i,
        l.count(0),
        l > m,
        [*reversed(l)],
        l[-2:],
        sum(l),
        sorted(l),
        tuple(l),
        min(l),
        0 in l,
        bool(c),
        l.__len__(),
        len(l[1:3]),
        all(isinstance(v, int) for v in l),
    )


class Box:
    def __init__(self, v):
        self.v = v

    def __eq__(self, o):
        return isinstance(o, Box) and self.v == o.v

    def __hash__(self):
        return hash(self.v)

    def __lt__(self, o):
        return self.v < o.v

    def __repr__(self):
        return f"Box({self.v})"


@case(lambda: {"a": Held()})
def aliasing(x, s):
    o = s["a"]
    s["b"] = o
    o.l.append(1)
    s["b"].a += 1
    q = [o] * 2
    q[0].new = len(o.l)
    t = (o,)
    s["l"] = o.l
    o.l = o.l + [2]
    return x * o.a, s["l"] is o.l, q[1].new, s["a"] is s["b"], t[0].a, s["l"]


class Temp:
    log = []

    def __del__(self):
        Temp.log.append("del")


@case(lambda: {"k": [1, 2]})
def compre(x, s):
    k = 3
    a = [i * k for i in s["k"] for j in range(2) if i > 1 or j]
    b = {i: [j for j in range(i)] for i in s["k"]}
    c = {i % 2 for i in s["k"]}
    g = sum(i * k for i in s["k"])
    s["k"].append(len(a))
    z = [[y * k for y in range(w)] for w in s["k"]]
    f = [(lambda: i)() for i in range(2)]
    n = [(m := i) for i in range(3)]
    return (
        x + g,
        a,
        b,
        c,
        z,
        f,
        n,
        m,
        [*zip(*[[1, 2], [3, 4]])],
        {**{k: v for k, v in zip("ab", range(2))}},
        dict(a=1) | {"b": 2},
    )


@case(lambda: [2])
def loops(x, s):
    out = []
    i = 0
    while True:
        i += 1
        if i == 2:
            continue
        if i > 4:
            break
        for j in range(i):
            if j == 2:
                break
        else:
            out.append(("noBreak", i))
        out.append(i)
    else:
        out.append("never")
    for k, (a, *b) in enumerate([(1, 2, 3), (4,)]):
        out.append((k, a, b))
    while s[0] < 3:
        s[0] += 1
    else:
        out.append("else")
    for q in []:
        pass
    else:
        out.append("empty")
    for d in {"a": 1}.items():
        out.append(d)
    x = x * (1 if i > 3 else 2)
    y = i and 5 or 6
    z = not i
    c = 1 < i <= 5 < 9
    return x, out, y, z, c


@pytest.mark.parametrize("found", cases_of(__name__))
@pytest.mark.filterwarnings("ignore")
def test_reflection(found: Case) -> None:
    check(found)
