"""Containers of another length at each call, however the program gets at them, and whatever it asks of them.

Where a container varies, an empty one stands for it in capture: nothing that is held, shown or made by C code may be of
that one.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

import torchcompile

X = torch.ones(2, dtype=torch.float64)
LENGTHS = (2, 3, 1, 4, 0, 5, 2, 6)
Program = Callable[[torch.Tensor, Any], Any]


def total(x: torch.Tensor, items: Iterable[Any]) -> torch.Tensor:
    for item in items:
        x = x + item
    return x


def of_rest(x: torch.Tensor, *items: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    return total(total(x, items), named.values())


def matched(x: torch.Tensor, p: Any) -> Any:
    match p:
        case []:
            return x
        case [a]:
            return x + a
        case [a, *rest]:
            return x + a + len(rest)


class Pair(NamedTuple):
    items: list[torch.Tensor]


class Case(NamedTuple):
    """A program, and what it is given of a list or dict of tensors: how it is held outside."""

    kind: type
    given: Callable[[Any], Any]
    program: Program
    whole: bool = True  # in one graph, a version a length


CASES: dict[str, Case] = {
    "dict and its view": Case(dict, lambda d: (d, d.values()), lambda x, p: (total(x, p[1]), len(p[0]))),
    "view of what is looped over": Case(
        dict, lambda d: (d, d.items()), lambda x, p: (total(x, p[0].values()), [k for k, _ in p[1]])
    ),
    "view": Case(dict, lambda d: d.items(), lambda x, p: [k for k, _ in p]),
    "proxy": Case(dict, types.MappingProxyType, lambda x, p: total(x, p.values())),
    "method items": Case(dict, lambda d: d.items, lambda x, p: [k for k, _ in p()]),
    "method get": Case(dict, lambda d: d.get, lambda x, p: x + p("a", 3)),
    "method len": Case(list, lambda d: d.__len__, lambda x, p: x + p()),
    "method iter": Case(list, lambda d: d.__iter__, lambda x, p: total(x, p())),
    "partial": Case(list, lambda d: functools.partial(of_rest, X, *d), lambda x, p: p() + x),
    "partial by names": Case(dict, lambda d: functools.partial(of_rest, X, **d), lambda x, p: p() + x),
    "partial of one": Case(list, lambda d: functools.partial(total, X, d), lambda x, p: p() + x),
    "iterator": Case(list, iter, total, whole=False),
    "map": Case(list, lambda d: map(torch.sin, d), total, whole=False),
    "chain": Case(list, lambda d: itertools.chain(d, d), total, whole=False),
    "deque": Case(list, collections.deque, total),
    "chain of maps": Case(dict, lambda d: collections.ChainMap(d, {"q": X}), lambda x, p: total(x, p.values())),
    "named tuple": Case(list, Pair, lambda x, p: total(x, p.items)),
    "namespace": Case(list, lambda d: types.SimpleNamespace(a=d), lambda x, p: (total(x, p.a), vars(p))),
    "dict of the user": Case(dict, collections.UserDict, lambda x, p: total(x, p.values())),
    "twice": Case(list, lambda d: (d, [d, d]), lambda x, p: (total(x, p[1][0]), p[1])),
    "returned": Case(list, lambda d: d, lambda x, p: (x, p, (p,), {"k": p})),
    "equal": Case(list, lambda d: ([len(d)] * len(d), [3, 3, 3]), lambda x, p: x + (p[0] == p[1])),
    "contains": Case(list, lambda d: [len(d)] * len(d), lambda x, p: x + (3 in p)),
    "text": Case(dict, lambda d: {k: len(k) for k in d}, lambda x, p: (x, sorted(p), str(p), f"{p}", "%s" % (p,))),  # noqa: UP031
    "order": Case(list, lambda d: list(range(len(d))), lambda x, p: (x, sorted(p), max(p, default=0), sum(p), any(p))),
    "unpacked": Case(list, tuple, lambda x, p: (x, [*p, x], (*p,))),
    "merged": Case(dict, lambda d: d, lambda x, p: (x, {**p, "z": x}, p | {"y": 1}, {"y": 1} | p, dict(p), dict(**p))),
    "parts": Case(list, lambda d: d, lambda x, p: (x, p[1:], p[::-1], p + p, p * 2, p[-1:])),
    "copies": Case(list, lambda d: d, lambda x, p: (x, p.copy(), list(p), tuple(p))),
    "arguments": Case(list, lambda d: d, lambda x, p: (lambda first=None, *rest: (first, rest))(*p)),
    "class and truth": Case(list, lambda d: d, lambda x, p: (x, type(p), isinstance(p, list), bool(p), not p)),
    "keys": Case(dict, lambda d: d, lambda x, p: (x, list(p), ["b" in p], p.get("b"), p.keys() & {"a"}, p.keys() == {"a"})),
    "changed": Case(dict, dict, lambda x, p: (p.setdefault("q", x), p.pop("a", None), list(p), p.popitem()[0], len(p))),
    "matched": Case(list, lambda d: d, matched),
}  # fmt: skip


def made(kind: type, length: int) -> Any:
    tensors = [torch.full((2,), float(i), dtype=torch.float64) for i in range(length)]
    return tensors if kind is list else dict(zip("abcdefgh", tensors, strict=False))


def plain(value: Any) -> Any:
    """What is compared: of tensors their numbers, and everything with its class."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return dict, [(key, plain(item)) for key, item in value.items()]
    return (type(value), [*map(plain, value)]) if isinstance(value, (list, tuple)) else value


@pytest.mark.expected_eager(
    "list_of_each_length", "loop_of_each_length", "unsplit_frame", "suspending_frame", "generator"
)
@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("name", CASES)
def test_a_container_of_another_length_is_what_it_is(name: str, fullgraph: bool) -> None:
    case = CASES[name]
    if fullgraph and not case.whole:
        pytest.skip("an iterator that was made outside ends the graph")
    compiled = torchcompile.compile(case.program, backend="eager", fullgraph=fullgraph)
    for length in LENGTHS:
        inside, outside = (case.given(made(case.kind, length)) for _ in range(2))
        assert plain(compiled(X, inside)) == plain(case.program(X, outside)), f"length {length}"
