"""No method of the program's classes runs because of capture: not to guard an object, nor to tell why a guard fails.

Methods that note their calls, or raise, stand where another kind of object was: in argument after argument, in drawn
orders, so that each version is asked about each of the others' objects.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo

NOTES: list[str] = []


def noting(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        NOTES.append(name)
        raise RuntimeError(f"{name} was asked")

    return method


_ASKED = ("__repr__", "__str__", "__eq__", "__bool__", "__len__", "__contains__", "__iter__", "__getitem__", "__call__")


def loud(*bases: type) -> Any:
    """A class whose methods are noted, and whose class says as little of itself."""
    asked = _ASKED if bases not in ((float,), (str,)) else ("__repr__", "__str__")  # with an == of its own it breaks
    meta = type("Loud", (type,), {"__repr__": noting("type's __repr__"), "__len__": noting("type's __len__")})
    own: dict[str, Any] = {name: noting(name) for name in asked}
    return meta("Object", bases, own | ({"__hash__": object.__hash__} if asked is _ASKED else {}))


LOUD, LOUD_LIST, LOUD_DICT, LOUD_SET, LOUD_FLOAT, LOUD_TEXT = (
    loud(*bases) for bases in ((), (list,), (dict,), (set,), (float,), (str,))
)


def sorts(x: torch.Tensor, given: Any) -> torch.Tensor:
    kind = type(given)
    if kind is LOUD or given is LOUD:
        return x * 2
    if kind in (LOUD_LIST, LOUD_DICT, LOUD_SET, LOUD_FLOAT, LOUD_TEXT):
        return x * 3
    if kind is list or kind is tuple:
        return x + len(given) + (given[0] if type(given[0]) is int else 0)
    if kind is dict:
        return x + len(given) + given["a"]
    if kind is set:
        return x * (4 if 1 in given else 5)
    if kind is types.SimpleNamespace:
        return given.x + given.y
    if kind is torch.Tensor:
        return x + given
    if given is None or kind is int or kind is str:
        return x * 6 if given == 5 else x
    return x * 7


def values() -> list[Any]:
    t = torch.ones(2)
    made = [None, LOUD(), LOUD, LOUD_LIST([1]), LOUD_DICT(a=1), LOUD_SET([1]), LOUD_FLOAT(2.0), LOUD_TEXT("a")]
    made += [[1, LOUD()], (1, LOUD()), [t], {"a": t}, {"a": t, "b": LOUD()}, {1}, {1, 2}, t, 5, 6, "a", sorts, int]
    return [*made, types.SimpleNamespace(x=t, y=2.0), types.SimpleNamespace(x=t, y=t), lambda: None]


@pytest.mark.parametrize("seed", range(8))
def test_objects_of_all_kinds_one_after_the_other(seed: int) -> None:
    options = torchdynamo.CaptureOptions(recompile_limit=99, strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(sorts)
    x, given = torch.ones(2), values()
    random.Random(seed).shuffle(given)
    for value in given:
        NOTES.clear()
        found, asked = compiled(x, value), list(NOTES)
        assert torch.equal(found, sorts(x, value)) and not asked, (type.__repr__(type(value)), asked)
    NOTES.clear()
    told = [event.detail for event in torchdynamo.stats().ledger.events]
    assert any("expected, got" in detail for detail in told) and not NOTES


def with_methods(base: type) -> Any:
    """A subclass with attributes and methods of its own, which the program calls."""

    class Own(base):
        def __len__(self) -> int:
            NOTES.append("len")
            return 7

        def __iter__(self) -> Any:
            NOTES.append("iter")
            return base.__iter__(self)  # type: ignore[attr-defined]

        def __contains__(self, key: object) -> bool:
            NOTES.append("in")
            return base.__contains__(self, key)  # type: ignore[attr-defined, no-any-return]

        def twice(self) -> float:
            return self.factor * 2

    for name in ("add", "append", "__setitem__", "update"):
        if hasattr(base, name):

            def method(self: Any, *args: Any, name: str = name) -> None:
                NOTES.append(name)
                getattr(base, name)(self, *args)

            setattr(Own, name, method)
    return Own


def uses(x: torch.Tensor, own: Any) -> Any:
    x = x * own.factor + own.tensor + own.twice()
    own.factor += 1
    own.made = 5.0
    if 1 in own:
        x = x * len(own)
    for item in own:
        x = x + item
    for name in ("add", "append"):
        if hasattr(own, name):
            getattr(own, name)(3)
    if isinstance(own, dict):
        own[5] = 6
    return x, own, type(own).__name__, isinstance(own, set), type(own) is set, bool(own), own == own


@pytest.mark.parametrize("base", [list, tuple, dict, set, frozenset])
def test_a_container_of_the_programs_own_class(base: type) -> None:
    kind, runs = with_methods(base), []
    options = torchdynamo.CaptureOptions(strict=True, fullgraph=True)
    for program in (uses, torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(uses)):
        own = kind({1: 2} if base is dict else [1, 2])
        own.factor, own.tensor, run = 2.0, torch.ones(2), []
        NOTES.clear()
        for _ in range(3):
            x, same, *facts = program(torch.ones(2), own)
            held = sorted(base.__iter__(own))  # type: ignore[attr-defined]
            run.append((x.tolist(), same is own, facts, held, str(vars(own)), list(NOTES)))
        runs.append(run)
    assert runs[0] == runs[1]
