# ruff: noqa: E701, E702, E741, F841, PLW1641, RUF012, UP031, C416, B905, PLW0603, PLC3002, PLR0124, B008, B023, B009, B012
# ruff: noqa: PLE0643, B904, RUF023, B007, RUF059, PIE804, PLC0415 - programs as people write them
"""Denser programs on numbers, text, iteration, NumPy and random numbers."""

from __future__ import annotations

import cmath
import contextlib
import decimal
import fractions
import functools
import hashlib
import io
import itertools
import math
import operator
import random
import statistics
import string
import typing
import uuid

import numpy as np
import pytest
import torch
from world_cases import Case, case, cases_of, check


@case()
def np_roundtrip(x, _):
    a = x.numpy()
    b = np.floor(a) + a.max(axis=0)
    return torch.from_numpy(b) * 2, b.shape, a.dtype == np.float32


@case(lambda: np.float32(2.5))
def np_scalar(x, k):
    return x * k, x + np.int64(3), np.sqrt(4.0), int(np.prod([2, 3]))


@case(lambda: {"a": np.arange(6.0).reshape(2, 3)})
def np_state(x, s):
    s["a"] += 1
    t = torch.as_tensor(s["a"])
    return x + t, s["a"].sum(), torch.tensor(s["a"]), s["a"][0, 1]


@case(lambda: {"a": np.arange(3)})
def np_replaced(x, s):
    s["a"] = s["a"] + 1
    return x * int(s["a"][0]), s["a"]


@case()
def np_on_tensor(x, _):
    return np.square(x), np.stack([x, x]), np.array(x), x.__array__(), np.asarray(x).max()


@case(lambda: random.Random(7), breaks=None)
def rnd_own(x, r):
    return x * r.random(), r.sample(range(5), 2), r.shuffle


def rnd_seeded_state():
    random.seed(3)
    return {"n": 0}


@case(breaks=None)
def rnd_module(x, _):
    random.seed(1)
    l = [1, 2, 3]
    random.shuffle(l)
    return x * random.random(), l, random.gauss(0, 1), random.choice("abc"), random.sample(range(10), 3)


@case(lambda: [1, 2, 3])
def iters(x, l):
    it = iter(l)
    a = next(it)
    b = next(it, None)
    rest = list(it)
    c = next(it, "end")
    z = zip(l, itertools.count(10))
    e = enumerate(l, 5)
    l.append(len(l))
    m = map(lambda p, q: p + q, l, l)
    f = filter(None, [0, 1, 2])
    ch = itertools.chain.from_iterable([[x], [x * 2]])
    g = (v * 2 for v in l if v % 2)
    return (
        x * a,
        b,
        rest,
        c,
        list(z),
        list(e),
        sum(m),
        list(f),
        [t for t in ch],
        list(g),
        list(zip(*[(1, 2), (3, 4)])),
        any(v > 2 for v in l),
        all([]),
        list(range(10, 0, -3)),
        reversed([1]).__next__(),
        dict(enumerate("ab")),
        [*map(str, l)],
        sum([[1], [2]], []),
        max(map(len, ["a", "bb"])),
    )


def gen():
    yield from range(5)


@case(lambda: (lambda it: it)(itertools.count(2)), breaks=None)
def count_outside(x, it):
    return x * next(it)


@case(list)
def gens(x, log):
    def g():
        try:
            got = yield 1
            log.append(got)
            try:
                yield 2
            except ValueError as e:
                log.append(str(e))
                yield 3
        finally:
            log.append("fin")
        return 9

    it = g()
    a = next(it)
    b = it.send("s")
    c = it.throw(ValueError("t"))
    try:
        next(it)
    except StopIteration as s:
        log.append(s.value)
    it2 = g()
    next(it2)
    it2.close()

    def rec(n):
        if n:
            yield n
            yield from rec(n - 1)

    return x * sum([a, b, c]), list(rec(3)), [*(i for i in (j for j in range(3)))]


class CM:
    cache: typing.ClassVar[dict] = {}

    @functools.cache
    def sq(self, n):
        return n * n

    @functools.cached_property
    def heavy(self):
        return [1, 2]


@case(CM)
def caches2(x, c):
    c.heavy.append(3)
    return x * c.sq(3), c.heavy, "heavy" in c.__dict__


@case(lambda: functools.partial(max, 3))
def partials2(x, p):
    q = functools.partial(operator.mul, x)
    r = functools.partial(q)
    d = functools.partial(dict, a=1)
    pm = functools.partial(sorted, key=lambda v: -v)
    return (
        q(2),
        p(1),
        p(5),
        d(b=2),
        pm([1, 3, 2]),
        functools.reduce(lambda a, b: a @ b.T, [x @ x.T, x @ x.T]),
        functools.reduce(operator.add, [1, 2], 10),
        r.args[0] is x,
    )


@case(lambda: [0.5], breaks=2)  # where C code asks what the float is that differs between calls
def maths(x, s):
    f = s[0]
    s[0] += 0.25
    return (
        x * math.exp(f),
        math.sin(f) + math.cos(f),
        math.atan2(f, 1),
        math.erf(f),
        math.gamma(f + 1),
        math.ldexp(f, 2),
        math.modf(f + 1),
        math.frexp(f),
        math.fsum([f, f]),
        math.dist([f], [0]),
        math.isqrt(17),
        math.lcm(4, 6),
        math.perm(5, 2),
        cmath.sqrt(-1),
        f.as_integer_ratio(),
        float.fromhex("0x1p3"),
        fractions.Fraction(1, 3) + 1,
        decimal.Decimal("1.1") + 1,
        statistics.mean([1, 2, f]),
        round(f),
        f // 0.2,
        f % 0.2,
        -(f**2),
        int(f),
        f.hex(),
        math.nextafter(f, 1),
        math.log1p(f),
        math.degrees(f),
        complex(f, 1) * 2,
        abs(complex(3, 4)),
        math.cbrt(8),
        math.sumprod([1], [2]) if hasattr(math, "sumprod") else 0,
    )


@case(lambda: {"n": 3})
def ints(x, s):
    n = s["n"]
    s["n"] += 1
    return (
        x[:, : min(n, 3)],
        n // 2,
        n % 2,
        n << 1,
        n >> 1,
        n & 1,
        n | 8,
        n ^ 5,
        ~n,
        n**2,
        n / 2,
        -n,
        n.bit_length(),
        divmod(n, 2),
        n.to_bytes(2, "big"),
        int.from_bytes(b"\x01\x02", "big"),
        bin(n),
        oct(n),
        f"{n:04d}",
        n.bit_count(),
        bool(n),
        float(n),
        n == 3,
        n < 4,
        range(n)[-1],
        len(range(n)),
        [0] * n,
        "ab" * n,
        x.new_zeros(n).shape,
        n in (3, 4),
        str(n),
        hash(n),
        isinstance(n, int),
        type(n),
        [10, 20, 30, 40, 50, 60][n],
        sum(range(n)),
        max(n, 4),
        n.numerator,
        (1,) * n,
        {n: "a"}[n],
        n is None,
        not n,
        x.expand(n, 2, 3).shape,
    )


@case(lambda: {"f": 0.5}, breaks=1)  # at `is_integer`, which asks what the float is
def floats(x, s):
    f = s["f"]
    s["f"] *= 1.5
    return (
        x * f,
        f + 1,
        f * f,
        f / 2,
        f < 0.6,
        f == 0.5,
        int(f * 10),
        round(f, 1),
        f"{f:.2f}",
        str(f),
        f.is_integer(),
        math.floor(f * 3),
        max(f, 0.6),
        type(f),
        isinstance(f, float),
        [f] * 2,
        {"f": f},
        (f,),
        bool(f),
        f if f > 0.7 else -f,
        repr(f),
        x.clamp(max=f),
        torch.full((2,), f),
        hash(f),
        f**0.5,
        math.sqrt(f),
        divmod(f, 0.3),
    )


@case(lambda: {"s": "a.b"})
def strs(x, s):
    t = s["s"]
    s["s"] = t + "c"
    b = t.encode()
    u = b.decode("utf8")
    return (
        x * len(t),
        t.join(["1", "2"]),
        t.split("."),
        t * 2,
        t[0],
        t[-1],
        t in "xa.by",
        t.center(9, "*"),
        t.swapcase(),
        t.ljust(5) + "|",
        t.rfind("."),
        t.index("b"),
        t.isidentifier(),
        "%-5s|%+d|%e|%%" % (t, 3, 1.5),
        f"{t}{[1][0]}{(2).real}",
        string.Template("$a b").substitute(a=t),
        str.maketrans("a", "z"),
        t.translate(str.maketrans("a", "z")),
        b[0],
        b.hex(),
        bytes([1, 2]),
        bytearray(b"ab")[1],
        ",".join(sorted(set("cab"))),
        t.replace("a", "A", 1),
        t.zfill(6),
        t.endswith(("b", "c")),
        "ab",
        "\n".join(["x"]),
        repr(t),
        ascii("é"),
        t.format_map({}),
        t.lstrip("a"),
        t.removesuffix("c"),
        max(t),
        t > "a",
        hash(t) == hash(t),
        f"{t!r:>8}{x.shape[0]:>3}",
        f"{t=}",
        t.partition(".")[1],
        u.upper().lower().capitalize(),
        "a-b_c".replace("-", "_").split("_"),
        t.isascii(),
        t.isdigit(),
        "x".isspace(),
    )


@case(breaks=None)
def redirect(x, _):
    buf = io.StringIO()
    with contextlib.redirect_stdout(buf):
        print("hello")
    return x + 1, buf.getvalue()


@case()
def hashes(x, _):
    return x + 1, hashlib.md5(b"a").hexdigest(), uuid.UUID(int=3).hex


@case(breaks=None)
def strbuild(x, _):
    buf = io.StringIO()
    buf.write("a")
    buf.write("b")
    return x + 1, buf.getvalue()


@case()
def torchsize(x, _):
    s = x.shape
    n = s[0] * s[1]
    *lead, last = s
    return (
        x.reshape(-1),
        s + (1,),
        (1,) + s,
        torch.Size((2,)) + s,
        s[1:] + s[:1],
        s * 2,
        s.numel(),
        list(s),
        tuple(s),
        s == x.T.shape,
        s != (2, 3),
        3 in s,
        s.count(2),
        s.index(3),
        x.new_empty(s).shape,
        lead,
        last,
        isinstance(s, tuple),
        type(s[:1]),
        type(s + (1,)),
        len(s),
        hash(s),
        str(s),
        sum(s),
        math.prod(s),
        torch.broadcast_shapes(s, (1, 3)),
        x.size(dim=1),
        max(s),
        sorted(s),
        reversed(s).__next__(),
        torch.empty(*s[:-1], 4).shape,
        s > (1, 1),
        {s: 1},
    )


@case(lambda: {"d": torch.float32})
def dts(x, s):
    d = s["d"]
    s["d"] = torch.float16 if d == torch.float32 else torch.bfloat16
    table = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
    dev = torch.device("cpu", 0) if False else torch.device("cpu")
    return (
        x.to(d),
        table[d],
        d in table,
        str(d),
        repr(dev),
        torch.finfo(d).max,
        d.is_complex,
        getattr(torch, "float32") is x.dtype,
        torch.tensor(1, dtype=d).dtype,
        x.type(),
        x.to("cpu").device.type,
        dev.type == "cuda",
        torch.empty(0, dtype=d).element_size(),
        d.itemsize,
        torch.promote_types(d, torch.float64),
        d is x.dtype,
        isinstance(d, torch.dtype),
        x.is_floating_point(),
        torch.device("meta").type,
        str(d).split(".")[-1],
        torch.cuda.is_available(),
        torch.backends.cudnn.enabled in (True, False),
        x.device.index,
        torch.get_default_dtype(),
        x.float().dtype,
        x.half().dtype,
        torch.iinfo(torch.uint8).max,
    )


@case(breaks=None)
def modes2(x, _):
    a = torch.is_grad_enabled()
    with torch.set_grad_enabled(False):
        b = torch.is_grad_enabled()
        y = x * 2
    with torch.inference_mode(False):
        pass

    @torch.no_grad()
    def f(z):
        return z * 3, torch.is_grad_enabled()

    with torch.enable_grad():
        c = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    return (
        y,
        a,
        b,
        c,
        f(x),
        torch.compiler.is_compiling() and False,
        torch.is_autocast_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.jit.is_scripting(),
        torch.is_inference(x) if hasattr(torch, "is_inference") else 0,
        torch.is_anomaly_enabled(),
    )


@pytest.mark.parametrize("found", cases_of(__name__))
@pytest.mark.filterwarnings("ignore")
def test_values(found: Case) -> None:
    check(found)
