"""Iterators over containers that the program changes: handed out, held by something, or gone on with behind a break."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo

CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [3, 1, 2],
    "dict": lambda: {3: "a", 1: "b", 2: "c"},
    "set": lambda: {3, 1, 2},
    "deque": lambda: collections.deque([3, 1, 2]),
}


def grow(of: Any) -> None:
    if isinstance(of, dict):
        of[7] = "d"
    elif isinstance(of, set):
        of.add(7)
    else:
        of.append(7)


def shrink(of: Any) -> None:
    if isinstance(of, dict):
        del of[3]
    elif isinstance(of, set):
        of.remove(3)
    else:
        of.remove(3)


def begun(make: Callable[[Any], Any], change: Callable[[Any], None]) -> Callable[[Any], Any]:
    def program(of: Any) -> Any:
        iterator = make(of)
        next(iterator)
        change(of)
        return iterator

    return program


def behind(make: Callable[[Any], Any], change: Callable[[Any], None]) -> Callable[[Any], Any]:
    def program(of: Any) -> Any:
        change(of)
        iterator = make(of)
        next(iterator)
        return iterator

    return program


def at_its_end(make: Callable[[Any], Any], change: Callable[[Any], None]) -> Callable[[Any], Any]:
    def program(of: Any) -> Any:
        iterator = make(of)
        for _ in iterator:
            pass
        change(of)
        return iterator

    return program


def fresh(make: Callable[[Any], Any], change: Callable[[Any], None]) -> Callable[[Any], Any]:
    def program(of: Any) -> Any:
        change(of)
        return make(of)

    return program


ORDERS = {f.__name__: f for f in (begun, behind, at_its_end, fresh)}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "iter": lambda of: iter(of),
    "reversed": lambda of: reversed(of),
    "zip": lambda of: zip(of, list(of), strict=False),
    "enumerate": lambda of: enumerate(of),
    "enumerate of reversed": lambda of: enumerate(reversed(of)),
    "map": lambda of: map(str, of),
    "chain": lambda of: itertools.chain(of, of),
    "items": lambda of: iter(of.items()),
    "values": lambda of: reversed(of.values()),
}


def outcome(run: Callable[[Any], Any], container: Callable[[], Any]) -> str:
    """What is left to hand out, and what became of the container."""
    of = container()
    try:
        found: object = list(run(of))
    except Exception as error:
        found = type(error), str(error)
    return repr((found, of))


@pytest.mark.parametrize("place", ["returned", "held", "behind a break"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_iterators_are_eagers(kind: str, order: str, place: str) -> None:
    for (name, make), change in itertools.product(MAKERS.items(), (grow, shrink)):
        use = ORDERS[order](make, change)

        def program(x: torch.Tensor, of: Any, use: Callable[[Any], Any] = use) -> Any:
            iterator = use(of)
            if place == "behind a break":
                y = x * 2
                torchdynamo.graph_break()
                return y + 1, iterator
            return x * 2, {"it": [iterator]} if place == "held" else iterator

        compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
        for _ in range(2):
            told = []
            for run in (program, compiled):
                result = lambda of, run=run: run(torch.zeros(1), of)[1]
                taken = (lambda of, f=result: f(of)["it"][0]) if place == "held" else result
                told.append(outcome(taken, CONTAINERS[kind]))
            assert told[1] == told[0], (name, change.__name__)


def test_a_list_of_each_length_is_gone_over_from_its_end() -> None:
    def program(x: torch.Tensor, items: list[int]) -> tuple[torch.Tensor, list[int]]:
        items.append(len(items))
        return x * 2, list(reversed(items))

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    items = [1, 2, 3]
    for _ in range(9):
        assert compiled(torch.zeros(1), items)[1] == items[::-1]


class Holder:
    it: Any = None


def appended_to(first: list[Any], second: list[Any], table: dict[Any, Any], holder: Holder) -> Any:
    first.append(iter([4]))
    return reversed(first)


def appended_and_gone_over(first: list[Any], second: list[Any], table: dict[Any, Any], holder: Holder) -> Any:
    first.append(9)
    second.append(reversed(first))
    return reversed(second)


def appended_before(first: list[Any], second: list[Any], table: dict[Any, Any], holder: Holder) -> Any:
    second.append(reversed(first))
    first.append(9)
    return second[-1]


def set_to_an_attribute(first: list[Any], second: list[Any], table: dict[Any, Any], holder: Holder) -> Any:
    first.append(9)
    holder.it = reversed(first)
    return holder.it


def a_key(first: list[Any], second: list[Any], table: dict[Any, Any], holder: Holder) -> Any:
    table[iter(first)] = 1
    table["q"] = 2
    return iter(table.values())


STORED = {f.__name__: f for f in (appended_to, appended_and_gone_over, appended_before, set_to_an_attribute, a_key)}


@pytest.mark.parametrize("name", STORED)
def test_iterators_that_are_stored_in_what_is_gone_over(name: str) -> None:
    def program(x: torch.Tensor, *of: Any) -> Any:
        return x * 2, STORED[name](*of)

    def contents(value: Any) -> Any:
        return [contents(item) for item in value] if hasattr(value, "__next__") else value

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for _ in range(2):
        told = []
        for run in (program, compiled):
            of = [1, 2, 3], [0], {"a": 1}, Holder()
            told.append((contents(run(torch.zeros(1), *of)[1]), [len(part) for part in of[:3]]))
        assert told[1] == told[0]
