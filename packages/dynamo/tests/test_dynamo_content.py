"""Content of objects: the same for the same program loaded again, another where one thing of it differs."""

from __future__ import annotations

import datetime
import functools
import math
import operator
import os
import random
import re
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

import torchdynamo
from torchdynamo._C import CompiledCallable
from torchdynamo.kept.content import REASONS, NoContent, content_of, digest_of
from torchdynamo.schemas import GuardKind

PROGRAM = """
import enum, functools

class Mode(enum.Enum):
    FAST = "fast"

class Base:
    scale = 2.0

class Layer(Base):
    def __init__(self, size=4):
        self.size = size
    @property
    def twice(self):
        return self.size * 2
    @staticmethod
    def fixed(x, by=1.5):
        return x + by
    @classmethod
    def made(cls):
        return cls(3)

def decorated(bias):
    def wrap(fn):
        @functools.wraps(fn)
        def inner(x):
            return fn(x) + bias
        return inner
    return wrap

def helper(x, *, alpha=0.5, dims=(0, 1)):
    return x * alpha + 1

def even(n):
    def odd(m):
        return m != 0 and even(m - 1)
    def even(m):
        return m == 0 or odd(m - 1)
    return even
recursive = even(2)

@decorated(1.0)
def shown(x):
    return x * 3
names = {"FAST", "SLOW"}
def chosen(x):
    return x in {"a", "b", "c"}
"""
NAMES = ("Mode.FAST", "Base", "Layer", "Layer.twice", "Layer.fixed", "Layer.made", "helper", "recursive", "shown",
         "chosen", "decorated")  # fmt: skip
# One thing of the program that differs, and the name whose content it is.
EDITS = [
    ('"fast"', '"quick"', "Mode.FAST"),
    ("class Layer(Base)", "class Layer", "Layer"),
    ("self.size * 2", "self.size * 3", "Layer.twice"),
    ("by=1.5", "by=1.25", "Layer.fixed"),
    ("cls(3)", "cls(4)", "Layer.made"),
    ("alpha=0.5", "alpha=-0.5", "helper"),
    ("dims=(0, 1)", "dims=(0, True)", "helper"),
    ("alpha + 1", "alpha + 1.0", "helper"),
    ("m == 0 or odd", "m == 0 and odd", "recursive"),
    ("decorated(1.0)", "decorated(1)", "shown"),
    ("x * 3", "x * 4", "shown"),
    ("x * 3", "-x", "shown"),
    ('"c"}', '"d"}', "chosen"),
]


def load(text: str) -> types.ModuleType:
    """The program under the same name, as another process would have it."""
    module = types.ModuleType("program_of_the_test")
    sys.modules[module.__name__] = module
    exec(compile(text, "program.py", "exec"), module.__dict__)
    return module


@pytest.fixture(autouse=True)
def forget_program() -> Any:
    yield
    sys.modules.pop("program_of_the_test", None)


def test_program_loaded_again_is_the_same_wherever_it_stands() -> None:
    first = {name: digest_of(operator.attrgetter(name)(load(PROGRAM))) for name in NAMES[:3] + NAMES[6:]}
    again = load("# moved\n\n\n" + PROGRAM)
    assert first == {name: digest_of(operator.attrgetter(name)(again)) for name in first}
    assert len(set(first.values())) == len(first)


@pytest.mark.parametrize("member", ["twice", "fixed", "made"])
def test_descriptors_are_their_functions(member: str) -> None:
    digests = {digest_of(vars(load(PROGRAM).Layer)[member]) for _ in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize(("old", "new", "name"), EDITS)
def test_one_difference_is_another_content(old: str, new: str, name: str) -> None:
    def of(text: str) -> str:
        owner, _, member = name.rpartition(".")
        module = load(text)
        return digest_of(vars(getattr(module, owner))[member] if owner else getattr(module, member))

    assert old in PROGRAM
    assert of(PROGRAM) != of(PROGRAM.replace(old, new, 1))


CONSTANTS: list[object] = [
    0, 0.0, -0.0, False, None, "", b"", (), frozenset(), 1, 1.0, True, "1", (1,), (1.0,), (True,), [].append, 1j,
    complex(-0.0, 1.0), float("nan"), float("inf"), torch.float32, torch.float64, torch.device("cpu"), torch.strided,
    torch.finfo(torch.float32), torch.iinfo(torch.int32), range(3), range(4), re.compile("a"), re.compile("a", re.I),
    torch.Size([1]), datetime.timedelta(1), datetime.date(2024, 1, 1), operator.itemgetter(0), operator.itemgetter(1),
    operator.attrgetter("a"), operator.methodcaller("a", 1), operator.methodcaller("a", b=1), list[int], list[str],
    int | str, torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.add, torch.mul, torch.conv2d, len,
    math.sqrt, torch.nn.functional.linear, torch.Tensor.add, torch.Tensor.shape, list.append, torch,
    torch.nn, torch.nn.Linear, int, Ellipsis, NotImplemented,
]  # fmt: skip


def test_constants_differ_by_type_and_value() -> None:
    digests: dict[str, object] = {}
    for value in CONSTANTS:
        try:
            same = digests.setdefault(digest_of(value), value)
            assert same is value, f"{same!r} and {value!r} have one content"
        except NoContent as refused:
            assert refused.reason == "bound"
    assert len(digests) == len(CONSTANTS) - 1  # `[].append` has none


def test_random_nests_have_the_content_of_their_values() -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    leaves = [value for value in CONSTANTS if isinstance(value, (int, float, str, bytes)) and value == value]

    def nest(depth: int) -> object:
        if depth == 0:
            return draw.choice(leaves)
        parts = [nest(draw.randrange(depth)) for _ in range(draw.randrange(4))]
        return frozenset(parts) if draw.random() < 0.3 else tuple(parts)

    for _ in range(200):
        state = draw.getstate()
        one = nest(3)
        draw.setstate(state)
        assert digest_of(one) == digest_of(nest(3)), f"seed {seed}: {one!r}"
        assert digest_of((one,)) != digest_of(one), f"seed {seed}: {one!r}"


class _Stateful:
    pass


class _Zone(datetime.tzinfo):
    pass


@functools.cache
def _cached() -> None: ...


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (_Stateful(), "state"), ([1], "state"), (torch.ones(1), "state"),  (_cached, "state"),
        (types.ModuleType("nowhere"), "not_loaded"), ([].append, "bound"),
        (datetime.datetime(2024, 1, 1, tzinfo=_Zone()), "time_zone"),
    ],
)  # fmt: skip
def test_what_has_no_content_is_refused_with_a_reason(value: object, reason: str) -> None:
    with pytest.raises(NoContent) as refused:
        content_of(value)
    assert refused.value.reason == reason
    assert REASONS[reason] in str(refused.value)


def all_digests() -> list[str]:
    """Of the program and of the constants; of what has none the reason."""
    module = load(PROGRAM)
    found = [digest_of(vars(module.Layer)[name]) for name in ("twice", "fixed", "made")]
    found += [digest_of(operator.attrgetter(name)(module)) for name in NAMES if not name.startswith("Layer.")]
    for value in CONSTANTS:
        try:
            found.append(digest_of(value))
        except NoContent as refused:
            found.append(refused.reason)
    return found


def test_content_holds_no_addresses_and_no_order_of_hashes() -> None:
    """In a process with another hash seed the content is the same, to the letter."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    script = "import test_dynamo_content as here; print(here.all_digests())"
    folders = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.splitlines()[-1] == str(all_digests())


def test_what_guards_of_a_module_hold_has_content() -> None:
    """Each object that the guards of a plain model compare by identity, type or value."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    compiled: CompiledCallable = torchdynamo.optimize(lambda gm, inputs: gm.forward)(model.forward)
    compiled(torch.ones(2, 3))
    owner = torchdynamo.api.owner_of(compiled)
    (entry,) = owner.versions()
    kinds = (GuardKind.IDENTITY, GuardKind.EQUALS, GuardKind.TYPE, GuardKind.DICT_KEYS)
    held = [guard for guard in entry.info.guards if guard.kind in kinds]
    assert len(held) > 30
    for guard in held:
        assert len(digest_of(guard.payload)) == 32, guard
