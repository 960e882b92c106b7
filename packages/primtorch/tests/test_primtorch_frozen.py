"""A record is what a frozen dataclass is, but for what happens to who assigns to a field."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from primtorch.frozen import record, remembering_record
from primtorch.once import cached_property

MAKERS = {
    "record": (record, dataclass(frozen=True, slots=True)),
    "remembering": (remembering_record, dataclass(frozen=True)),
}
both = pytest.mark.parametrize("makers", MAKERS.values(), ids=MAKERS)


def classes(makers: tuple[Callable[[type], type], ...], names: dict[str, Any], own: dict[str, Any]) -> list[Any]:
    """A class of these fields by each of the makers."""
    return [
        make(type("Made", (), {"__annotations__": dict.fromkeys(names, "object"), **names, **own})) for make in makers
    ]


@both
def test_random_records_are_frozen_dataclasses(makers: tuple[Callable[[type], type], ...]) -> None:
    seed = random.randrange(1 << 30)
    chosen = random.Random(seed)
    for _ in range(60):
        names = {
            f"f{place}": field(
                default=place,
                compare=chosen.random() < 0.8,
                repr=chosen.random() < 0.8,
                hash=chosen.choice((None, True, False)),
            )
            for place in range(chosen.randrange(5))
        }
        own: dict[str, Any] = {}
        for name, method in (
            ("__eq__", lambda self, other: True),
            ("__hash__", lambda self: 3),
            ("__repr__", lambda self: "own"),
        ):
            if chosen.random() < 0.2:
                own[name] = method
        ours, theirs = classes(makers, names, own)
        assert inspect.signature(ours) == inspect.signature(theirs), seed
        drawn = [[chosen.randrange(2) for _ in names] for _ in range(8)]
        for one, other in zip(drawn, drawn[1:], strict=False):
            a, b, x, y = ours(*one), ours(*other), theirs(*one), theirs(*other)
            assert (a == b, hash(a), repr(a)) == (x == y, hash(x), repr(x)), f"seed {seed}"
            assert (a == 3, a != b) == (x == 3, x != y), f"seed {seed}"


@record
class Tree:
    """Refers to others."""

    of: Any
    count: int = 0


class Named(Tree):
    """A plain class of a record's methods."""


@remembering_record
class Remembers:
    number: int

    @cached_property
    def double(self) -> int:
        return 2 * self.number


def test_what_python_does_with_records() -> None:
    tree = Tree([Tree(None)])
    assert copy.deepcopy(tree) == tree == pickle.loads(pickle.dumps(tree)) and copy.copy(tree) is not tree
    assert dataclasses.replace(tree, count=2) == Tree(tree.of, 2) and dataclasses.is_dataclass(Tree)
    assert not hasattr(tree, "__dict__")
    tree.of.append(tree)
    assert repr(tree) == "Tree(of=[Tree(of=None, count=0), ...], count=0)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(tree)
    assert (
        Named(1) == Named(1) != Tree(1) and hash(Named(1)) == hash(Tree(1)) and repr(Named(1)) == "Named(of=1, count=0)"
    )
    remembers = Remembers(3)
    assert remembers.double == 6 and remembers == Remembers(3) and hash(remembers) == hash(Remembers(3))


def test_a_method_is_compiled_once_even_where_it_was_read_before_its_first_call() -> None:
    @record
    class Read:
        number: int

    before = vars(Read)["__hash__"]
    wrapped = lambda self: before(self) + 1
    type.__setattr__(Read, "__hash__", wrapped)
    assert hash(Read(3)) == before(Read(3)) + 1 == hash((3,)) + 1 and vars(Read)["__hash__"] is wrapped
    first = vars(Read)["__eq__"]
    assert Read(1) == Read(1) and vars(Read)["__eq__"] is not first and first(Read(1), Read(1))
