"""Operators and protocols that user classes define: arithmetic, comparison, conversion, iteration, contexts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from world_cases import Case, case, cases_of, check


class Vec:
    def __init__(self, v: Any) -> None:
        self.v = v

    def __add__(self, other: Any) -> Any:
        return Vec(self.v + other.v) if isinstance(other, Vec) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Vec(other + self.v)

    def __iadd__(self, other: Any) -> Vec:
        self.v = self.v + other
        return self

    def __sub__(self, other: Any) -> Vec:
        return Vec(self.v - getattr(other, "v", other))

    def __rsub__(self, other: Any) -> Vec:
        return Vec(other - self.v)

    def __mul__(self, other: Any) -> Vec:
        return Vec(self.v * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Vec:
        return Vec(self.v / other)

    def __floordiv__(self, other: Any) -> Vec:
        return Vec(self.v // other)

    def __mod__(self, other: Any) -> Vec:
        return Vec(self.v % other)

    def __pow__(self, other: Any) -> Vec:
        return Vec(self.v**other)

    def __matmul__(self, other: Vec) -> Any:
        return self.v @ other.v.T

    def __neg__(self) -> Vec:
        return Vec(-self.v)

    def __pos__(self) -> Vec:
        return self

    def __abs__(self) -> Vec:
        return Vec(abs(self.v))

    def __invert__(self) -> Vec:
        return Vec(1 - self.v)

    def __lshift__(self, n: int) -> Vec:
        return Vec(self.v * 2**n)

    def __and__(self, other: Any) -> str:
        return "and"

    def __or__(self, other: Any) -> str:
        return "or"

    def __xor__(self, other: Any) -> str:
        return "xor"

    def __len__(self) -> int:
        return len(self.v)

    def __getitem__(self, key: Any) -> Any:
        return self.v[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.v[key] = value

    def __contains__(self, item: Any) -> bool:
        return item in (1, 2)

    def __iter__(self) -> Any:
        return iter(self.v)

    def __bool__(self) -> bool:
        return len(self) > 0

    def __repr__(self) -> str:
        return f"Vec(len={len(self)})"

    def __format__(self, spec: str) -> str:
        return f"<{spec}:{len(self)}>"


@case()
def arithmetic_of_new_objects(x: torch.Tensor, _: Any) -> Any:
    a, b = Vec(x), Vec(x * 2)
    c = (a + b) * 3 - b / 2
    d = 1.0 - c**2
    d += 1.0
    e = sum([a, b, c])
    return (
        [c.v, d.v, (2 * a).v, (-a).v, (+a).v, abs(a).v, (~a).v, (a << 2).v, a @ b, e.v, (a // 2).v, (a % 2).v],
        a & b,
        a | b,
        a ^ b,
    )


@case(lambda: Vec(torch.ones(2, 3)))
def arithmetic_of_a_given_object(x: torch.Tensor, a: Vec) -> Any:
    b = a * 2 + Vec(x)
    a += 1.0
    return b.v, 3.0 + a, a


@case(lambda: Vec([1.0, 2.0, 3.0]))
def containers_of_users(x: torch.Tensor, a: Vec) -> Any:
    a[0] = a[0] + 1
    first, *rest = a
    return x * first + sum(rest), len(a), 2 in a, bool(a), repr(a), f"{a:>4}", [*a], list(reversed(a.v))


@case()
def operator_that_nobody_has(x: torch.Tensor, _: Any) -> Any:
    try:
        return Vec(x) + "no"
    except TypeError as error:
        return x + 1, str(error)


class Version:
    def __init__(self, *parts: int) -> None:
        self.parts = parts

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Version) and self.parts == other.parts

    def __lt__(self, other: Version) -> bool:
        return self.parts < other.parts

    def __le__(self, other: Version) -> bool:
        return self.parts <= other.parts

    def __hash__(self) -> int:
        return hash(self.parts)


@case(lambda: {Version(1, 2): 3.0})
def comparisons(x: torch.Tensor, table: dict[Version, float]) -> Any:
    a, b = Version(1, 2), Version(1, 3)
    found = [a < b, a > b, a <= b, a >= b, a == b, a != b, a == Version(1, 2), max(a, b) is b, a in [b, a]]
    table[b] = table.get(b, 0.0) + 1.0
    return x * table[a], found, [v.parts for v in sorted([b, a])], Version(1, 2) in table


class Poly:
    def __index__(self) -> int:
        return 2

    def __int__(self) -> int:
        return 7

    def __float__(self) -> float:
        return 2.5

    def __complex__(self) -> complex:
        return 1j

    def __round__(self, n: int = 0) -> float:
        return 2.0 + n

    def __divmod__(self, other: Any) -> Any:
        return ("dm", other)

    def __str__(self) -> str:
        return "poly"

    def __sizeof__(self) -> int:
        return 99


@case(Poly)
def conversions(x: torch.Tensor, p: Poly) -> Any:
    return (
        x * float(p) + int(p), [10, 20, 30][p], round(p, 1), divmod(p, 3), str(p), f"{p}", f"{p!s:>6}", complex(p),
        list(range(p)), "ab" * p.__index__(), hex(p),
    )  # fmt: skip


class Walker:
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Walker:
        return self

    def __next__(self) -> int:
        if self.n <= 0:
            raise StopIteration
        self.n -= 1
        return self.n


class Old:
    """Iterated by index."""

    def __getitem__(self, i: int) -> int:
        if i >= 3:
            raise IndexError
        return i * 10


@case(lambda: Walker(5))
def iterators_of_users(x: torch.Tensor, w: Walker) -> Any:
    first = next(w, None)
    for i in Walker(3):
        x = x * (i + 1)
    return x, first, list(zip(Walker(2), Old(), strict=False)), sum(Old()), 20 in Old(), list(map(str, Walker(3)))


class Resource:
    def __init__(self) -> None:
        self.events: list[str] = []

    def __enter__(self) -> Resource:
        self.events.append("enter")
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        self.events.append("exit" if kind is None else kind.__name__)
        return kind is KeyError


@case(Resource)
def context_managers_of_users(x: torch.Tensor, r: Resource) -> Any:
    with r as inner:
        x = x + len(inner.events)
    with Resource() as a, r:
        a.events.append("body")
        raise KeyError("k")
    return x, a


@pytest.mark.parametrize("found", cases_of(__name__))
def test_operators(found: Case) -> None:
    check(found)
