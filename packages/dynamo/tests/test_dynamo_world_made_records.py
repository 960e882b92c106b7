"""Data classes and enumerations that a program makes itself, with annotations that are text, which Python's library
looks up in the module's dict; and that dict in the hands of a program."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
import types
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypedDict, TypeVar

import pytest
import torch
from world_cases import Case, case, cases_of, check

import torchdynamo

RATE = 2.0


@case()
def defaults_and_factories(x: torch.Tensor, s: Any) -> Any:
    @dataclass
    class Config:
        value: torch.Tensor
        scale: float = 2.0
        log: list[torch.Tensor] = field(default_factory=list)
        kind: ClassVar[str] = "config"

    config = Config(x * 2)
    config.log.append(x)
    return config.value * config.scale + config.log[0], Config.kind, len(dataclasses.fields(config)), Config(x).log


@case()
def frozen_and_replaced(x: torch.Tensor, s: Any) -> Any:
    @dataclass(frozen=True)
    class Config:
        width: int
        rate: float = 0.5

        def __post_init__(self) -> None:
            if self.width < 0:
                raise ValueError("negative")

    config = Config(3)
    try:
        config.width = 4  # type: ignore[misc]
    except dataclasses.FrozenInstanceError as error:
        refused = str(error)
    try:
        dataclasses.replace(config, width=-1)
    except ValueError as error:
        refused += str(error)
    other = dataclasses.replace(config, rate=3.0)
    return x * other.rate + other.width, refused, repr(other), hash(config) == hash(Config(3)), config == other


@case()
def computed_after_the_fields(x: torch.Tensor, s: Any) -> Any:
    @dataclass
    class Batch:
        rows: torch.Tensor
        by: dataclasses.InitVar[int] = 1
        shift: InitVar[float] = 0.5
        mean: torch.Tensor = field(init=False)

        def __post_init__(self, by: int, shift: float) -> None:
            self.mean = self.rows.mean() * by + shift

    batch = Batch(x, 3)
    return dataclasses.asdict(batch), dataclasses.astuple(batch)


@case()
def ordered_slots_and_keywords(x: torch.Tensor, s: Any) -> Any:
    @dataclass(order=True, slots=True, kw_only=True)
    class Entry:
        rank: int
        payload: torch.Tensor = field(compare=False, repr=False)

    entries = sorted([Entry(rank=3, payload=x), Entry(rank=1, payload=x * 2)])
    return entries[0].payload, [repr(e) for e in entries], entries[0] < entries[1]


@case()
def inherited_and_matched(x: torch.Tensor, s: Any) -> Any:
    @dataclass
    class Node:
        value: Any

    @dataclass(unsafe_hash=True)
    class Leaf(Node):
        name: str = "leaf"

    match Leaf(3):
        case Leaf(n, "leaf"):
            y = x * n
        case _:
            y = x
    return y, {Leaf(1): 2}[Leaf(1)], isinstance(Leaf(1), Node), Leaf.__match_args__


@case()
def made_by_a_call(x: torch.Tensor, s: Any) -> Any:
    kind = dataclasses.make_dataclass("Pair", ["first", ("second", int, 3)], frozen=True)
    pair = kind(x)
    return pair.first * pair.second, repr(kind(1)), [f.name for f in dataclasses.fields(kind)]


@case()
def enumerations(x: torch.Tensor, s: Any) -> Any:
    class Mode(enum.Enum):
        PLAIN = 1
        DOUBLE = enum.auto()

        @property
        def factor(self) -> int:
            return self.value * 10

    class Flags(enum.Flag):
        A = enum.auto()
        B = enum.auto()

    class Names(str, enum.Enum):  # noqa: UP042 (another base, another metaclass's work)
        FIRST = "first"

    class Ranks(enum.IntEnum):
        LOW = 1
        HIGH = 5

    table = {Mode.PLAIN: 1, Mode.DOUBLE: 2}
    return (
        x * Mode.DOUBLE.factor * table[Mode(2)] * sum(Ranks),
        (Flags.A | Flags.B).value,
        Names("first").name,
        [m.name for m in Mode],
        Flags.A in (Flags.A | Flags.B),
        Mode["PLAIN"] is Mode.PLAIN,
    )


@case()
def named_tuples_and_typed_dicts(x: torch.Tensor, s: Any) -> Any:
    class Two(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor
        c: int = 3

    class Options(TypedDict, total=False):
        z: int

    pair = NamedTuple("pair", [("first", int), ("second", "str")])  # noqa: UP014 (by a call)
    two = Two(x, x * 2)
    first, *rest = two
    return two.a + rest[0] * two.c, Options(z=1), repr(pair(2, "b")), two._fields, Two(1, 2)._replace(a=3)._asdict()  # type: ignore


@case()
def generic_classes(x: torch.Tensor, s: Any) -> Any:
    S = TypeVar("S")

    class Held(Generic[S]):
        def __init__(self, value: S) -> None:
            self.value = value

    return x * Held[int](3).value, Held[int].__args__  # type: ignore[attr-defined]


# -- a module's dict ---------------------------------------------------------------------------


@case()
def names_of_a_namespace(x: torch.Tensor, s: Any) -> Any:
    own, other = globals(), vars(math)
    return (
        x * own["RATE"] * other["pi"],
        own.get("ABSENT"),
        own.get("ABSENT", 3),
        "RATE" in own,
        "ABSENT" not in own,
        own.__getitem__("__name__"),
        bool(own),
        sys.modules[__name__].__dict__ is own,
    )


@case(breaks=1)
def a_namespace_as_a_whole(x: torch.Tensor, s: Any) -> Any:
    return x + len(globals()) * 0, "RATE"


@pytest.mark.parametrize("found", cases_of(__name__))
def test_made_records(found: Case) -> None:
    check(found)


def _compiled(program: Any) -> Any:
    torchdynamo.reset()
    return torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)


def _module() -> types.ModuleType:
    """A module of its own for each of the two that are compared."""
    made = types.ModuleType("made_for_a_test")
    made.__dict__.update(__builtins__=__builtins__, level=1, spare=None)
    return made


def _written(module: types.ModuleType, x: torch.Tensor) -> Any:
    table = vars(module)
    table["level"] += 1
    table.setdefault("first", x.shape[0])
    table.update(last=table.get("level"), mean=x.mean())
    gone = table.pop("spare", "gone")
    if "temporary" in table:
        del table["temporary"]
    table["temporary"] = gone
    try:
        table["nowhere"]
    except KeyError as error:
        missing = error.args
    return x * table["level"] + module.last, gone, missing, module.temporary


def test_writes_to_a_namespace_are_seen_and_replayed() -> None:
    compiled = _compiled(_written)
    ours, theirs = _module(), _module()
    for n in (2, 2, 3, 3):
        x = torch.arange(float(n))
        got, want = compiled(ours, x), _written(theirs, x)
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=0)
        assert got[1:] == want[1:]
        assert list(vars(ours)) == list(vars(theirs))
        assert {k: v for k, v in vars(ours).items() if k not in ("mean", "__builtins__")} == {
            k: v for k, v in vars(theirs).items() if k not in ("mean", "__builtins__")
        }
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=0, atol=0)
    assert not torchdynamo.stats().breaks


def test_what_was_read_of_a_namespace_is_guarded() -> None:
    def program(module: types.ModuleType, x: torch.Tensor) -> Any:
        table = vars(module)
        return x * table["level"] + (table.get("extra") or 0), "spare" in table

    compiled, module, x = _compiled(program), _module(), torch.ones(2)
    for change in ({}, {"level": 3}, {"extra": 5}, {"extra": None}):
        vars(module).update(change)
        torch.testing.assert_close(compiled(module, x), program(module, x), rtol=0, atol=0)
    del module.spare
    assert compiled(module, x)[1] is False
    del module.level
    with pytest.raises(KeyError, match="level"):
        compiled(module, x)
