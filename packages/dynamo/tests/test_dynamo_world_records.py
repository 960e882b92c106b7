"""Classes made by the standard library: dataclasses, named tuples, enumerations; `match` on them."""

from __future__ import annotations

import dataclasses
import enum
from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from world_cases import Case, case, cases_of, check


@dataclasses.dataclass
class Config:
    width: int = 4
    rate: float = 0.5
    tags: list[str] = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=1, repr=False, compare=False)
    total: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.width * self.rate


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    x: float
    y: float = 0.0

    def moved(self, by: float) -> Point:
        return dataclasses.replace(self, x=self.x + by)


@dataclasses.dataclass(slots=True)
class Packed:
    a: Any
    b: int = 2


@dataclasses.dataclass(kw_only=True)
class Keyed(Config):
    name: str = "k"
    scale: dataclasses.InitVar[float] = 2.0

    def __post_init__(self, scale: float) -> None:
        super().__post_init__()
        self.scaled = self.total * scale


@case(Config)
def dataclass_given(x: torch.Tensor, c: Config) -> Any:
    c.width += 1
    c.tags.append(f"w{c.width}")
    other = dataclasses.replace(c, rate=2.0)
    return (
        x * c.total + other.total,
        c == Config(),
        repr(other),
        dataclasses.asdict(c),
        [f.name for f in dataclasses.fields(c)],
    )


@case()
def dataclass_new(x: torch.Tensor, _: Any) -> Any:
    c = Config(3, tags=["a"])
    d = Keyed(width=2, scale=3.0)
    return x * c.total + d.scaled, c, d, dataclasses.astuple(c), dataclasses.is_dataclass(c)


@case(lambda: Point(1.0))
def dataclass_frozen(x: torch.Tensor, p: Point) -> Any:
    q = p.moved(2.0)
    try:
        q.x = 3.0  # type: ignore[misc]
    except dataclasses.FrozenInstanceError as error:
        return x * q.x, p < q, hash(p) == hash(Point(1.0)), {p: 1}[Point(1.0)], str(error), sorted([q, p])
    return x


@case()
def dataclass_slots(x: torch.Tensor, _: Any) -> Any:
    p = Packed(x * 2)
    p.b += 1
    return p, Packed(1) == Packed(1, 2), dataclasses.replace(p, b=9)


class Pair(NamedTuple):
    left: Any
    right: Any = 2

    def total(self) -> Any:
        return self.left + self.right


Triple = namedtuple("Triple", "a b c", defaults=(5,))


@case(lambda: Pair(1.0))
def namedtuples(x: torch.Tensor, p: Pair) -> Any:
    t = Triple(x, b=2)
    left, right = p
    q = p._replace(left=x)
    return (
        q.total(),
        t._asdict(),
        t.c,
        Triple._fields,
        Pair._make([1, 2]),
        p == (1.0, 2),
        left * right,
        t[1:],
        p._field_defaults,
    )


class Color(enum.Enum):
    RED = 1
    GREEN = enum.auto()
    ALIAS = 1  # noqa: PIE796

    @property
    def bright(self) -> float:
        return self.value * 2.0

    @classmethod
    def default(cls) -> Color:
        return cls.GREEN


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Mode(enum.Flag):
    A = enum.auto()
    B = enum.auto()
    AB = A | B


class Name(str, enum.Enum):  # noqa: UP042
    ONE = "one"

    def __str__(self) -> str:
        return self.value


@case(lambda: {"color": Color.RED, "level": Level.LOW})
def enums(x: torch.Tensor, s: dict[str, Any]) -> Any:
    y = x * s["color"].bright * s["level"]
    s["color"] = Color.default()
    return (
        y,
        Color.ALIAS is Color.RED,
        Color["GREEN"],
        Color(2),
        [c.name for c in Color],
        len(Color),
        Color.RED in Color,
    )


@case()
def enum_flags(x: torch.Tensor, _: Any) -> Any:
    m = Mode.A | Mode.B
    try:
        Color(9)
    except ValueError as error:
        return (
            x * m.value,
            m is Mode.AB,
            Mode.A in m,
            bool(m & Mode.A),
            ~Mode.A,
            str(error),
            Level.HIGH > Level.LOW,
            Level.HIGH + 1,
        )
    return x


@case(lambda: Name.ONE)
def enum_of_strings(x: torch.Tensor, n: Name) -> Any:
    table = {Name.ONE: 2.0}
    if n == "one":
        x = x * table[n]
    match n:
        case Name.ONE:
            x = x + 1
    return x, str(n), f"{n}", n.upper(), n.name, isinstance(n, str)


@case()
def matching_on_classes(x: torch.Tensor, _: Any) -> Any:
    found = []
    for item in (Point(1.0, 2.0), Pair(1, 3), {"k": 5, "z": 1}, [1, 2, 3], 7, "s", None, Color.RED):
        match item:
            case Point(x=a, y=b):
                found.append(("point", a, b))
            case Pair(left, right):
                found.append(("pair", left, right))
            case {"k": k, **rest}:
                found.append(("dict", k, rest))
            case [first, *others]:
                found.append(("list", first, others))
            case int(n) if n > 5:
                found.append(("int", n))
            case "s" | "t":
                found.append("str")
            case Color.RED:
                found.append("red")
            case _:
                found.append("other")
    return x + len(found), found


@case()
def dataclasses_made_within(x: torch.Tensor, _: Any) -> Any:
    fields = [("value", torch.Tensor), ("scale", float, 2.0), ("tags", list, dataclasses.field(default_factory=list))]
    made = dataclasses.make_dataclass("made", fields)
    frozen = dataclasses.dataclass(frozen=True, order=True)(type("Key", (), {"__annotations__": {"rank": int}}))
    try:
        frozen(1).rank = 2
        refused = False
    except dataclasses.FrozenInstanceError:
        refused = True
    one = dataclasses.replace(made(x, tags=["a"]), scale=3.0)
    keys = sorted([frozen(3), frozen(1)])
    return one.value * one.scale + keys[0].rank, refused, one.tags, made(1, 2) == made(1, 2), len(made(1).tags)


@pytest.mark.parametrize("found", cases_of(__name__))
def test_records(found: Case) -> None:
    check(found)
