"""Functions that the caller, or the program before a break, makes anew for each call: compiled once, not for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo

Made = tuple[Any, ...]


def called(x: torch.Tensor, function: Any) -> Made:
    return function(x) + 1, function.__name__


def anonymous(i: int) -> Made:
    return (lambda v: v * 2,)


def over_state(i: int) -> Made:
    tensor, number, items = torch.full((2,), float(i)), i, [i]

    def function(v: Any, d: int = 3, *, k: Any = [1]) -> Any:  # noqa: B006 - a default that is a list
        return v * tensor + number + items[0] + d + k[0]

    return (function,)


def with_defaults(i: int) -> Made:
    return (lambda v, t=torch.full((2,), float(i)), n=i: v * t + n,)


def counted(x: torch.Tensor, count: Any, get: Any) -> Made:
    count()
    count()
    return x * get(), get()


def counters(i: int) -> Made:
    n = i

    def count() -> None:
        nonlocal n
        n += 1

    return count, (lambda: n) if i % 3 != 2 else getter(i)


def getter(i: int) -> Any:
    return lambda: i


def read(x: torch.Tensor, function: Any) -> Made:
    return x + 1, function.__name__, function.tag


def named(i: int) -> Made:
    def function() -> None:
        return None

    function.__name__ = f"f{i // 3}"
    function.tag = i // 3  # type: ignore[attr-defined]
    return (function,)


def across_breaks(x: torch.Tensor, n: int) -> Made:
    items = [n]

    def inner(v: Any) -> Any:
        return v * items[0] + n

    x = x + 1
    torchdynamo.graph_break()
    once = inner(x)
    torchdynamo.graph_break()
    items.append(n)
    return once, inner(once), len(items)


@pytest.mark.parametrize(
    ("program", "make", "recompiles"),
    [
        (called, anonymous, 1),
        (called, over_state, 2),  # the second makes its number symbolic
        (called, with_defaults, 2),
        (counted, counters, 4),  # a cell that two functions share, and two cells
        (read, named, 4),  # three names
        (across_breaks, lambda i: (i,), 5),  # of three parts
    ],
)
def test_functions_made_anew(program: Callable[..., Made], make: Callable[[int], Made], recompiles: int) -> None:
    torchdynamo.reset()
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for i in range(8):
        x = torch.full((2,), float(i))
        got, wanted = compiled(x, *make(i)), program(x, *make(i))
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert not torchdynamo.stats().fallbacks
    assert torchdynamo.stats().recompiles <= recompiles
