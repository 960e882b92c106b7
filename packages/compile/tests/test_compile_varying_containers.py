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

pytestmark = pytest.mark.warm

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


def numbers(items: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(range(len(items)))


def changed_set(x: torch.Tensor, p: set[int]) -> Any:
    p.add(100)
    p.discard(0)
    p |= {50}
    return x * len(p), p


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
    "numbers in a tuple": Case(
        list, numbers, lambda x, p: (x * sum(p), 2 in p, p[:1], p + (1,), (*p, 0), {p: 1}, p == (0, 1), hash(p), len(p))
    ),
    "a tuple of numbers looped over": Case(list, numbers, total),
    "a tuple of numbers in texts": Case(
        list, numbers, lambda x, p: (x, " ".join(["%d"] * len(p)) % p, f"{p}", str(p), repr([p])),
    ),
    "a tuple of numbers beside others": Case(
        list, numbers, lambda x, p: (x, (0, 1) == p, (0, 1) < p, [(0, 1)] == [p], p in [(0, 1)], p in {(0, 1): 2}, {(0, 1)} == {p}, (0, 1) + p, [*p] == list(p), max(p, (1,))),
    ),
    "a tuple of texts": Case(
        list, lambda d: tuple("abcdefgh"[: len(d)]), lambda x, p: (x, "".join(p), "bc".startswith(p), "b" in p, dict(zip(p, p)), "-".join((*p, "z"))),
    ),
    "a tuple of numbers in C": Case(
        list, numbers, lambda x, p: (x, torch.ones(9, 9, 9, 9, 9, 9, 9, 9)[p].shape, divmod(*(*p, 1, 1)[:2]), range(*(*p, 1, 1)[:2]), slice(*(*p, 2, 3)[:2]), torch.Size(p), x.new_ones(p).sum()),
    ),
    "a tuple for C": Case(list, numbers, lambda x, p: (x.expand(*p, 2), torch.tensor(p), torch.zeros(p))),
    "a set, asked": Case(
        list, lambda d: set(numbers(d)),
        lambda x, p: (x + len(p), 3 in p, 1 not in p, bool(p), sum(p), max(p, default=0), isinstance(p, set), type(p)),
    ),
    "a set, looped over": Case(list, lambda d: set(numbers(d)), lambda x, p: (total(x, p), total(x, sorted(p)))),
    "a set, with others": Case(
        list, lambda d: set(numbers(d)),
        lambda x, p: (x, p | {9}, {9} | p, p & {1, 2}, {1, 2} - p, p ^ {1}, p <= {0, 1}, {0, 1} >= p, p == {0, 1}, {*p, 7}),
    ),
    "a set, beside other kinds of sets": Case(
        list, lambda d: [set(numbers(d)), frozenset(numbers(d))], lambda x, p: [
            (x, one <= q, q <= one, one == q, q | one, one & q, [q] == [one], q in [one])
            for q in p for one in ({0, 1}, frozenset((0, 1)), dict.fromkeys((0, 1)).keys())
        ],
    ),
    "a set, by methods": Case(
        list, lambda d: set(numbers(d)),
        lambda x, p: (x, p.union([9]), {1}.union(p), {1}.isdisjoint(p), p.copy(), frozenset(p), list(p), f"{p}"),
    ),
    "a set, changed": Case(list, lambda d: set(numbers(d)), changed_set),
    "a set of texts": Case(list, lambda d: set("abcdefgh"[: len(d)]), lambda x, p: (x * ("b" in p), sorted(p), [*p] == list(p))),
    "a frozenset": Case(
        list, lambda d: frozenset(numbers(d)),
        lambda x, p: (x + len(p), 3 in p, {p: 1}, hash(p) == hash(frozenset(p)), p | {9}, type(p), p == {0, 1}),
    ),
    "sets within": Case(
        list, lambda d: {"a": set(numbers(d)), "b": [frozenset(numbers(d))]}, lambda x, p: (x * (2 in p["a"]), p["b"][0], p)
    ),
    "keys that vary": Case(list, lambda d: {len(d): 1.0}, lambda x, p: (x * sum(p.values()), 3 in p, list(p))),
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
    if isinstance(value, (set, frozenset)):
        return type(value), set(value)
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


BOUNDED: dict[str, tuple[Callable[[int], Any], Program]] = {
    "a dict's other keys": (lambda n: {n: 1.0}, lambda x, p: x * sum(p.values())),
    "stacked": (lambda n: made(list, n + 1), lambda x, p: x + torch.stack(p).sum(0)),
    "joined": (lambda n: made(list, n + 1), lambda x, p: x + torch.cat(p).sum(0)),
    "summed": (lambda n: made(list, n + 1), lambda x, p: x + sum(p)),
}


@pytest.mark.expected_eager("list_of_each_length", "loop_of_each_length")
@pytest.mark.parametrize("name", BOUNDED)
def test_twelve_of_them_need_few_captures(name: str) -> None:
    """And none is refused for the number of versions that there are."""
    given, program = BOUNDED[name]
    compiled = torchcompile.compile(program, backend="eager")
    for n in range(12):
        torch.testing.assert_close(compiled(X, given(n)), program(X, given(n)), rtol=0, atol=0)
    counts = collections.Counter(event.kind.id for event in torchcompile.report().events for _ in range(event.count))
    assert counts["recompiled"] <= 7 and "recompile_limit" not in counts, counts
