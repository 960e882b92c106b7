"""Small programs on Python's world and how they are judged: equal to eager call by call, effects included, and in how
many graphs and breaks they are captured."""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import torchdynamo

ATOMS = (int, str, bytes, bool, type(None), type, torch.dtype, torch.device, torch.Size, types.FunctionType)


@dataclass(frozen=True)
class Case:
    """A program `program(x, state)`; `make_state` gives its state anew for eager and for the compiled one.

    `breaks` is None where a program breaks, and how often depends on the library that it uses.
    """

    program: Callable[..., Any]
    make_state: Callable[[], Any]
    breaks: int | None
    calls: int


CASES: dict[str, list[Case]] = {}


def case(
    make_state: Callable[[], Any] = lambda: None, *, breaks: int | None = 0, calls: int = 3
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a program under the module that it is written in."""

    def register(program: Callable[..., Any]) -> Callable[..., Any]:
        CASES.setdefault(program.__module__, []).append(Case(program, make_state, breaks, calls))
        return program

    return register


def cases_of(module: str) -> list[Any]:
    """The programs of a module as pytest's parameters, by name."""
    import pytest

    return [pytest.param(found, id=found.program.__name__) for found in CASES[module]]


def check(found: Case) -> None:
    """Runs a case eagerly and compiled."""
    torchdynamo.reset()
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = torchdynamo.optimize(backend)(found.program)
    expected_state, state = found.make_state(), found.make_state()
    for call in range(found.calls):
        torch.manual_seed(call)
        x = torch.randn(2, 3)
        results = []
        for program, own in ((found.program, expected_state), (compiled, state)):
            torch.manual_seed(call)
            try:
                results.append(program(x.clone(), own))
            except Exception as error:  # the same exception is the same result
                results.append((type(error), str(error)))
        assert same(results[0], results[1]), f"call {call}: eager {results[0]!r}, compiled {results[1]!r}"
        assert same(expected_state, state), f"after call {call}: eager {expected_state!r}, compiled {state!r}"
    stats = torchdynamo.stats()
    assert not stats.fallbacks, stats.fallbacks
    breaks = sum(count for count, _, _ in stats.breaks)
    assert breaks == found.breaks or (found.breaks is None and breaks), stats.breaks
    assert graphs or found.breaks != 0, "nothing was captured"


def check_with_breaks(found: Case) -> None:
    """Runs a case with a break before each of its statements: all that it holds has to outlive one."""
    torchdynamo.reset()
    interrupted = _with_breaks(found.program)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(interrupted)
    expected_state, state = found.make_state(), found.make_state()
    for call in range(found.calls):
        torch.manual_seed(call)
        x = torch.randn(2, 3)
        results = []
        for program, own in ((interrupted, expected_state), (compiled, state)):
            torch.manual_seed(call)
            random.seed(call)
            try:
                results.append(program(x.clone(), own))
            except Exception as error:
                results.append((type(error), str(error)))
        assert same(results[0], results[1]), f"call {call}: eager {results[0]!r}, compiled {results[1]!r}"
        assert same(expected_state, state), f"after call {call}: eager {expected_state!r}, compiled {state!r}"
    expected = {"unsplit_frame", "suspending_frame", "recompile_limit"}
    assert not (fallbacks := [e for e in torchdynamo.stats().fallbacks if e.kind.id not in expected]), fallbacks


def _with_breaks(program: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with `graph_break()` before each of its statements, inside of blocks too."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(program)))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    function.body = _interrupted(function.body)
    ast.increment_lineno(tree, program.__code__.co_firstlineno - 1)
    code = compile(ast.fix_missing_locations(tree), program.__code__.co_filename, "exec", annotations.compiler_flag)
    scope = program.__globals__
    before, scope["_break_here"] = scope[program.__name__], torchdynamo.graph_break
    exec(code, scope)
    made, scope[program.__name__] = scope[program.__name__], before
    return made  # type: ignore[no-any-return]


def _interrupted(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, (ast.For, ast.While, ast.If, ast.With, ast.Try)):
            for name in ("body", "orelse", "finalbody"):
                setattr(statement, name, _interrupted(getattr(statement, name, [])))
            for handler in getattr(statement, "handlers", ()):
                handler.body = _interrupted(handler.body)
        if not isinstance(statement, (ast.Global, ast.Nonlocal)):
            found += ast.parse("_break_here()").body
        found.append(statement)
    return found


def same(a: Any, b: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Equal in value and in type, all the way down."""
    if type(a) is not type(b):
        return (
            type(a).__qualname__ == type(b).__qualname__ and "<locals>" in type(a).__qualname__ and _alike(a, b, seen)
        )
    if a is b or (id(a), id(b)) in seen:
        return True
    seen |= {(id(a), id(b))}
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b) and a.requires_grad == b.requires_grad
    if type(a).__name__ == "ndarray":
        return a.dtype == b.dtype and a.tolist() == b.tolist()
    if isinstance(a, weakref.ref):
        return same(a(), b(), seen)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    if isinstance(a, type) and "<locals>" in a.__qualname__:
        return a.__qualname__ == b.__qualname__
    if isinstance(a, ATOMS) and type(a) in ATOMS:
        return a == b or (isinstance(a, types.FunctionType) and a.__qualname__ == b.__qualname__)
    return _alike(a, b, seen)


def _alike(a: Any, b: Any, seen: frozenset[tuple[int, int]]) -> bool:
    own = [dict(getattr(o, "__dict__", {})) for o in (a, b)]
    slots = [name for kind in type(a).__mro__ for name in _slots(kind)]
    for name in slots:
        for o, found in zip((a, b), own, strict=True):
            if hasattr(o, name):
                found[name] = getattr(o, name)
    if own[0].keys() != own[1].keys():
        return False
    parts = [(own[0][name], own[1][name]) for name in own[0]]
    if isinstance(a, dict):
        if len(a) != len(b):
            return False
        base = OrderedDict if isinstance(a, OrderedDict) else dict
        parts += list(zip(base.keys(a), base.keys(b), strict=True))
        parts += [(dict.__getitem__(a, x), dict.__getitem__(b, y)) for x, y in list(parts[-len(a) :])] if a else []
    elif isinstance(a, (set, frozenset)):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    elif isinstance(a, (list, tuple)) or type(a).__name__ in ("deque", "ChainMap", "mappingproxy"):
        if len(a) != len(b):
            return False
        parts += list(zip(a, b, strict=True))
    elif isinstance(a, types.MethodType):
        parts += [(a.__self__, b.__self__), (a.__func__, b.__func__)]
    elif not parts and not slots and type(a).__module__ not in ("builtins",) and type(a).__eq__ is object.__eq__:
        return type(a).__repr__ is object.__repr__ or repr(a) == repr(b)
    elif not parts and not slots:
        return bool(a == b)
    return all(same(x, y, seen) for x, y in parts)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
