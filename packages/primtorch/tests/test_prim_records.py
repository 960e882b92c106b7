"""Records as text: what is read is what was written, and nothing else is read."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from primtorch.records import Codec, NotARecord, NotAsText, Records
from primtorch.spec import TensorSpec
from primtorch.symbolic import (
    Definition,
    FloatExpr,
    IntExpr,
    Learnt,
    ShapeEnv,
    constant,
    learn,
    learnt_since,
    mark_of,
    relate,
    symbol,
)
from primtorch.symbolic.codecs import CODECS
from primtorch.symbolic.codecs import RECORDS as SYMBOLIC
from primtorch.symbolic.float_expr import float_constant
from primtorch.symbolic.learnt import NewSymbol
from primtorch.symbolic.relation import Defined, FloatRelation, Truth, connect


class Kind(enum.Enum):
    FIRST = "first"


@dataclass(frozen=True)
class Record:
    name: str
    held: object = ()


@dataclass(frozen=True)
class Several:
    sizes: tuple[object, ...]
    name: str = ""
    rest: tuple[int, ...] | None = None


class Stranger:
    pass


RECORDS = Records((Record, Several, Kind))
SPEC = TensorSpec((2, 3), (3, 1), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.0, 0.1, float("inf"), "a\n\"b", (), (1, (2.0, [None])), [1, {"a": (2,)}], frozenset({1, 2}),
        torch.bfloat16, torch.strided, torch.channels_last, torch.device("cuda:1"), torch.ops.aten.add.Tensor,
        torch.ops.aten.relu.default, Kind.FIRST, Record("r", (Record("s"), Kind.FIRST)), SPEC, {"tuple": 1}, {1: {}},
        Several((1, (2, [3]), Several((), "s")), "r", (4,)), Several(({"tuple": (1,)},)), Several(()), Several((), "", None),
    ],
    ids=repr,
)  # fmt: skip
def test_read_is_written(value: Any) -> None:
    read = RECORDS.value(RECORDS.text(value))
    assert read == value and type(read) is type(value) and repr(read) == repr(value)


@dataclass(frozen=True)
class Rounded:
    """Holds another value than it is given."""

    number: int
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.number // 2 * 2)


@dataclass(frozen=True)
class Counted:
    """Is made of another value than it holds."""

    number: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.number + 1)


OWN = Records((Rounded, Counted, Record), codecs=(Codec(range, lambda r: (r.start, r.stop), range),))


def test_a_class_that_makes_something_else_of_its_fields_is_asked_for_each_value() -> None:
    assert OWN.value(OWN.text((Rounded(5), range(2, 7)))) == (Rounded(4), range(2, 7))
    for value in (Counted(1), Record("r", [Counted(2)]), (range(2, 7, 3),)):
        with pytest.raises(NotAsText, match="differs when it is read again"):
            OWN.text(value)


SHARING = Records((Record, Several), codecs=CODECS, shared=(TensorSpec, Record, IntExpr))


def test_what_is_equal_is_written_once() -> None:
    other = TensorSpec((4,), (1,), torch.float32, torch.device("cpu"))
    named = Record("n", (SPEC, symbol("s0")))
    value = [named, SPEC, other, Record("n", (SPEC, symbol("s0"))), {"a": symbol("s0"), "b": other}, named, S * T]
    text = SHARING.text(value)
    assert text.count('"TensorSpec"') == 2 and text.count('"Record"') == 1 and text.count('"Symbol"') == 3
    assert text.count('"again"') == 5
    read = SHARING.value(text)
    assert read == value and SHARING.text(read) == text


def test_only_what_has_a_form_is_shared() -> None:
    for value in (Record("r", [Stranger()]), Record("r", [1])):  # cannot be hashed
        with pytest.raises(NotAsText):
            SHARING.text([value, value])


@pytest.mark.parametrize("place", ["0", "-1", '"0"', "[]", "null", "1.5"])
def test_a_place_where_nothing_was_written(place: str) -> None:
    with pytest.raises(NotARecord):
        SHARING.value(f'[{{"again":{place}}},{{"record":["Record","r"]}}]')


def test_not_a_number_is_read_as_one() -> None:
    """Though it is not equal to itself."""
    written = RECORDS.text(Record("r", (float("nan"), [math.nan, 1.0])))
    assert repr(RECORDS.value(written)) == repr(Record("r", (math.nan, [math.nan, 1.0])))


@pytest.mark.parametrize(
    "value",
    [
        Stranger(),
        Record("r", Stranger()),
        torch.zeros(2),
        lambda: 1,
        torch.ops.prims.sin.default,
        1j,
        print,
        Several([1]),  # type: ignore[arg-type]
    ],
    ids=["object", "record of an object", "tensor", "function", "operator", "complex", "builtin", "a list"],
)
def test_what_has_no_form(value: object) -> None:
    with pytest.raises(NotAsText):
        RECORDS.text(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", '{"record":["Stranger"]}', '{"record":["Record",1,2,3]}', '{"operator":"os.system.default"}',
        '{"operator":"aten.no_such.default"}', '{"operator":"prims.sin.default"}', '{"dtype":"nn"}', '{"call":[]}',
        '{"member":["Kind","SECOND"]}', '{"device":"nowhere"}', '{"float":"x"}', '{"dict":[[[],1]]}', "[" * 10**5,
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_is_no_record(text: str) -> None:
    with pytest.raises(NotARecord):
        RECORDS.value(text)


SYMBOLS = Records(SYMBOLIC, codecs=CODECS)
S, T = symbol("s0"), symbol("s1")


@pytest.mark.parametrize(
    "value",
    [
        constant(0), constant(-3), S, S * S * constant(2) - T + constant(1), (S * T) // (T + constant(1)) % S,
        S.minimum(T).maximum(T // constant(2)), FloatExpr("f0"), float_constant(-0.0), float_constant(float("nan")),
        Definition("fdiv", (FloatExpr("f0"), float_constant(2.0))), relate("lt", S, T), Truth(True), Defined("f0"),
        connect("or", relate("eq", S, T), relate("ge", S, constant(4))), FloatRelation("same", FloatExpr("f0"), FloatExpr("f1")),
        Learnt((NewSymbol("u0", None, 0, None),), (relate("ne", S // constant(2), constant(1)),)),
    ],
    ids=repr,
)  # fmt: skip
def test_expressions_are_read_as_they_were_written(value: Any) -> None:
    text = SYMBOLS.text(value)
    read = SYMBOLS.value(text)
    assert read == value and repr(read) == repr(value) and SYMBOLS.text(read) == text
    if hasattr(value, "program"):
        assert repr(read.program()) == repr(value.program())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"record":["Lambda",1]}', "Lambda"),
        ('{"record":["Symbol","os.system()"]}', "os.system"),
        ('{"record":["Call","pow",1,2]}', "pow"),
        ('{"record":["IntExpr",{"tuple":[{"tuple":[{"tuple":[]},0]}]}]}', "0"),
        ('{"record":["IntExpr",{"tuple":[{"tuple":[{"tuple":["s0"]},1]}]}]}', "s0"),
    ],
)
def test_an_unknown_record_is_named(text: str, named: str) -> None:
    with pytest.raises(NotARecord, match=named):
        SYMBOLS.value(text)


def asked(length: int) -> tuple[ShapeEnv, Learnt | None]:
    """What a program that compares half a size, and divides by it, has its environment learn."""
    env = ShapeEnv()
    size = env.symbol(length, "x.shape[0]")
    mark = mark_of(env)
    assert bool(size // 2 == 2) is (length < 6)
    env.define("idiv", constant(1), symbol("s0") - constant(4))
    return env, learnt_since(env, mark)


def test_what_was_learnt_is_learnt_again_for_an_example_of_the_case() -> None:
    env, learnt = asked(8)
    assert learnt is not None and learnt == SYMBOLS.value(SYMBOLS.text(learnt))
    for length, is_case in ((10, True), (8, True), (5, False), (4, False)):
        fresh = ShapeEnv()
        fresh.symbol(length, "x.shape[0]")
        assert learn(fresh, learnt) is is_case
        if is_case:
            assert fresh.definitions == env.definitions
            assert {str(guard.expr) for guard in fresh.guards} == {str(guard.expr) for guard in env.guards}
        else:
            assert len(fresh.symbols) == 1 and not fresh.guards
    given = ShapeEnv()
    mark = mark_of(given)
    given.symbol(3, "x.shape[0]")
    assert learnt_since(given, mark) is None
    data = ShapeEnv()
    data.symbol(3, "x.shape[0]")
    assert learn(data, Learnt((NewSymbol("u0", None, 2, 7),))) and data.range_of(symbol("u0")) == (2, 7)
