"""Dicts that are reached through what shows them: mapping proxies, and views made outside of the compiled function."""

from __future__ import annotations

import collections
import inspect
import itertools
import random
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import torchcompile

PROGRAMS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "item": lambda x, table: x * table["b"],
    "items": lambda x, table: [x * v for k, v in table.items() if k != "a"],
    "keys": lambda x, table: x * sum(len(k) for k in table.keys()),  # noqa: SIM118
    "values": lambda x, table: x + sum(table.values()),
    "iter": lambda x, table: {k: x * table[k] for k in table},
    "get": lambda x, table: x + table.get("b") + table.get("zz", 3),
    "contains": lambda x, table: x + 1 if "zz" in table else x - len(table),
    "unpacked": lambda x, table: (lambda **k: x * k["b"])(**table),
    "merged": lambda x, table: x * dict(table)["b"] + {**table, "b": 1}["b"],
    "union": lambda x, table: x * (table | {"b": 7})["b"],
    "copied": lambda x, table: (x + 1, table.copy()),
    "equal": lambda x, table: x * (table == {"a": 1}),
    "reversed": lambda x, table: x * next(iter(reversed(list(table.values())))),
    "missing": lambda x, table: x * table["no"],
    "returned": lambda x, table: (x + 1, table),
    "shown": lambda x, table: (x + 1, types.MappingProxyType({"t": x * 2, **table})),
}
KINDS: dict[str, Callable[[dict[str, Any]], Mapping[str, Any]]] = {
    "dict": types.MappingProxyType,
    "ordered": lambda table: types.MappingProxyType(collections.OrderedDict(table)),
    "default": lambda table: types.MappingProxyType(collections.defaultdict(int, table)),
    "chain": lambda table: types.MappingProxyType(collections.ChainMap(table)),
}


def outcome(program: Callable[..., Any], *args: Any) -> Any:
    try:
        return program(*args)
    except KeyError as error:
        return repr(error)


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, types.MappingProxyType):
        a, b = dict(a), dict(b)
    if isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        same(list(a.values()), list(b.values()))
    else:
        torch.testing.assert_close(a, b) if isinstance(a, torch.Tensor) else None
        assert isinstance(a, torch.Tensor) or a == b


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.expected_eager("program_raised", "exception", "unsupported_read", "c_function", "generator")
def test_a_proxy_is_the_mapping_behind_it(name: str, kind: str) -> None:
    program = PROGRAMS[name]
    seed = random.randrange(10**6)
    torch.manual_seed(seed)
    compiled = torchcompile.compile(program, backend="eager")
    x = torch.randn(3, dtype=torch.float64)
    table: dict[str, Any] = {"a": 1, "b": torch.randn(3, dtype=torch.float64)}
    if name in ("equal", "keys"):
        table["b"] = 2
    proxy = KINDS[kind](table)
    try:
        for change in ({}, {"b": table["b"] * 2}, {"c": 4}, {"a": 5}):
            table.update(change)
            if kind in ("ordered", "default"):
                proxy = KINDS[kind](table)
            same(outcome(compiled, x, proxy), outcome(program, x, proxy))
    except AssertionError as error:
        raise AssertionError(f"seed {seed}") from error
    if kind != "chain" and name != "missing":
        assert not {"unsupported_read", "c_function"} & {event.kind.id for event in torchcompile.report().surprises}


VIEW_PROGRAMS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, view: x * sum(len(str(v)) for v in view),
    "list": lambda x, view: (x + 1, list(view)),
    "length": lambda x, view: x * len(view),
    "contains": lambda x, view: x + 1 if "a" in view or 1 in view or ("a", 1) in view else x,
    "returned": lambda x, view: (x * 2, [v for v in view], view is not None),
    "behind": lambda x, view: x * len(view.mapping),
}


@pytest.mark.parametrize("name", VIEW_PROGRAMS)
@pytest.mark.parametrize(
    ("base", "how"), itertools.product((dict, collections.OrderedDict), ("keys", "values", "items"))
)
def test_a_view_is_that_of_the_dict_behind_it(name: str, base: type, how: str) -> None:
    program = VIEW_PROGRAMS[name]
    compiled = torchcompile.compile(program, backend="eager", fullgraph=True)
    x = torch.ones(2, dtype=torch.float64)
    table = base(a=1, b=2)
    for change in ({}, {"b": 30}, {"c": 4}):
        table.update(change)
        same(compiled(x, getattr(table, how)()), program(x, getattr(table, how)()))


def test_a_write_behind_a_view_is_seen() -> None:
    def program(x: torch.Tensor, table: dict[str, Any], proxy: Mapping[str, Any], view: Any) -> Any:
        table["n"] = x * 2
        table["k"] += 1
        return proxy["n"] + proxy["k"], len(view), [v for v in view if isinstance(v, int)]

    for base in (dict, collections.OrderedDict):
        compiled = torchcompile.compile(program, fullgraph=True, backend="eager")
        ours, eager = base(k=1), base(k=1)
        for _ in range(3):
            x = torch.randn(2, dtype=torch.float64)
            given = compiled(x, ours, types.MappingProxyType(ours), ours.values())
            same(given, program(x, eager, types.MappingProxyType(eager), eager.values()))
            same(dict(ours), dict(eager))


def test_signatures_are_read_in_the_graph() -> None:
    """As programs do that pass on those keyword arguments that a function takes."""

    def update(a: torch.Tensor, b: float = 1.0) -> torch.Tensor:
        return a * b

    signature = inspect.signature(update)

    def program(x: torch.Tensor, **given: float) -> torch.Tensor:
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        taken = {
            k: v
            for k, v in given.items()
            if k in signature.parameters.keys() and signature.parameters[k].kind not in kinds
        }  # noqa: E501, SIM118
        if any(p.kind == kinds[1] for p in signature.parameters.values()):
            taken = given
        return update(x, **taken)

    compiled = torchcompile.compile(program, fullgraph=True)
    x = torch.randn(3, dtype=torch.float64)
    for given in ({}, {"b": 2.0}, {"c": 3.0, "b": 4.0}):
        torch.testing.assert_close(compiled(x, **given), program(x, **given))
