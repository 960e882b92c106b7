"""Random programs of side effects, with breaks and exceptions in random places: compiled leaves what eager leaves.

`effect_programs.py` draws many more of the same programs, in processes side by side. Below: the order of names.
"""

from __future__ import annotations

import collections
import gc
import os
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effect_programs import check, show

import torchdynamo

COUNT = int(os.environ.get("EFFECT_PROGRAMS", "80"))


def test_effects_are_replayed_in_order_across_breaks_and_exceptions() -> None:
    first = random.randrange(1 << 40)
    wrong = [seed for seed, report in map(check, range(first, first + COUNT)) if report is not None]
    assert not wrong, f"seeds {wrong}\n{show(wrong[0])}"


def deletes_and_sets(held: Any) -> None:
    del held.b
    held.left = True
    held.b = 1


def deletes_its_own(held: Any) -> None:
    held.left = 1
    held.right = 2
    del held.left
    held.left = 3


def deletes_again(held: Any) -> None:
    held.b = 1
    del held.b
    held.last = 2
    held.b = 3
    del held.b
    held.b = 4


def reads_in_between(held: Any) -> None:
    del held.a
    held.left = 1
    held.a = 2
    held.names = list(vars(held))
    del held.left
    held.left = 3


def breaks_in_between(held: Any) -> None:
    del held.b
    held.left = 1
    print(end="")
    held.b = 2
    del held.left
    held.left = 3


class Plain:
    pass


@pytest.mark.parametrize("kind", [Plain, types.SimpleNamespace])
@pytest.mark.parametrize(
    "write", [deletes_and_sets, deletes_its_own, deletes_again, reads_in_between, breaks_in_between]
)
def test_a_name_that_was_deleted_comes_last(write: Callable[[Any], None], kind: Callable[[], Any]) -> None:
    def program(x: torch.Tensor, held: Any) -> torch.Tensor:
        write(held)
        return x + 1

    options = torchdynamo.CaptureOptions(strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for _ in range(2):
        found = []
        for run in (program, compiled):
            held = kind()
            held.a, held.b, held.c = 1, 2, 3
            run(torch.ones(2), held)
            found.append(list(vars(held).items()))
        assert found[1] == found[0]


def puts_true_for_one(held: Any) -> None:
    held.table.clear()
    held.table[True] = 2
    held.names.discard(1)
    held.names.add(True)
    held.table[1.0] = 3


def puts_one_for_true(held: Any) -> None:
    held.table.clear()
    held.table[1] = 2
    held.names.clear()
    held.names.add(1)
    held.names |= {True, 2.0}


def test_equal_keys_of_other_types_are_other_keys() -> None:
    def program(x: torch.Tensor, held: Any, write: Callable[[Any], None]) -> torch.Tensor:
        write(held)
        return x + 1

    compiled = torchdynamo.optimize(
        lambda graph, inputs: graph.forward, options=torchdynamo.CaptureOptions(strict=True)
    )(program)
    helds = [types.SimpleNamespace(table={1: 1, 2: 2}, names={1, 3}) for _ in range(2)]
    for write in (puts_true_for_one, puts_one_for_true, puts_true_for_one, puts_true_for_one):
        for run, held in zip((program, compiled), helds, strict=True):
            run(torch.ones(2), held, write)
        assert repr(helds[1].table) == repr(helds[0].table)
        assert sorted(map(repr, helds[1].names)) == sorted(map(repr, helds[0].names))


class Released(Exception):
    pass


def fails_in_finally(x: torch.Tensor) -> torch.Tensor:
    try:
        [].remove("absent")
    except Exception:
        x = x @ torch.ones(7, 7)
    finally:
        del Plain.late  # type: ignore[attr-defined]
    return x


def fails_in_c(x: torch.Tensor) -> torch.Tensor:
    try:
        return x @ torch.ones(7, 7)
    finally:
        raise Released


@pytest.mark.parametrize("fails", [fails_in_finally, fails_in_c])
def test_a_generator_is_closed_with_the_exception_that_gave_it_up(fails: Any) -> None:
    """Without a garbage collection: no frame of capture's own keeps it, nor one of a library that capture called."""
    log: list[str] = []

    def values() -> Any:
        try:
            print(end="")
            yield 1
        finally:
            log.append("closed")

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in values():
            x = fails(x)
        return x

    compiled = torchdynamo.optimize(
        lambda graph, inputs: graph.forward, options=torchdynamo.CaptureOptions(strict=True)
    )(program)
    gc.collect()
    gc.disable()
    try:
        for call in range(3):
            with pytest.raises((AttributeError, Released)):
                compiled(torch.ones(2, 3))
            assert log == ["closed"] * (call + 1)
    finally:
        gc.enable()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_error_on_a_way_that_the_data_does_not_take(fullgraph: bool) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1:
            raise ValueError("too large")
        return x.absent_method(1)  # type: ignore[no-any-return, operator]

    options = torchdynamo.CaptureOptions(strict=True, fullgraph=fullgraph)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for x in (torch.ones(2), torch.zeros(2), torch.ones(2)):
        with pytest.raises((ValueError, AttributeError)) as eager:
            program(x)
        with pytest.raises(eager.type, match=str(eager.value)):
            compiled(x)


class Filling(dict):  # type: ignore[type-arg]
    def __missing__(self, key: object) -> object:
        self[key] = 7
        return 7


@pytest.mark.parametrize("kind", [lambda: collections.defaultdict(list, new=1), lambda: Filling(new=1)])
def test_a_key_that_is_asked_for_is_not_made(kind: Callable[[], Any]) -> None:
    """By a guard of a version that read the key: the next round finds it gone."""

    def program(x: torch.Tensor, table: Any) -> torch.Tensor:
        for _ in range(2):
            print(end="")
            x = x + len(table)
            del table["new"]
        return x

    compiled = torchdynamo.optimize(
        lambda graph, inputs: graph.forward, options=torchdynamo.CaptureOptions(strict=True)
    )(program)
    for _ in range(2):
        table = kind()
        with pytest.raises(KeyError, match="new"):
            compiled(torch.ones(2), table)
        assert not table
