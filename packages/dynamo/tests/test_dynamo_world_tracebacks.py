"""Tracebacks in the hands of a program, exits that get exceptions, and the class that an iterator says it has."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import threading
import traceback
import types
from typing import Any

import pytest
import torch
from world_cases import Case, case, cases_of, check

import torchdynamo


class Indexed:
    def __getitem__(self, index: int) -> int:
        return [1, 2][index]


class Swallows:
    """Notes what its exit is given."""

    def __enter__(self) -> Swallows:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.kind, self.args = kind.__name__, error.args
        self.none, self.same = trace is None, trace is error.__traceback__
        self.is_one = isinstance(trace, types.TracebackType)
        return True


class Formats(Swallows):
    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.line = trace.tb_lineno
        self.text = [line for line in traceback.format_exception(kind, error, trace) if "^" not in line][:1]
        return True


@case()
def given_to_an_exit(x: torch.Tensor, s: Any) -> Any:
    with Swallows() as c:
        raise ValueError(3)
    return x * 2, c.kind, c.args, c.none, c.same, c.is_one


@case(breaks=None)
def read_by_an_exit(x: torch.Tensor, s: Any) -> Any:
    with Formats() as c:
        raise ValueError(3)
    return x * 2, c.line, c.text


@case(breaks=None)
def returned(x: torch.Tensor, s: Any) -> Any:
    try:
        raise ValueError(3)
    except ValueError:
        trace = sys.exc_info()[2]
    return x * 2, trace.tb_lineno  # type: ignore[union-attr]


@case()
def handed_on(x: torch.Tensor, s: Any) -> Any:
    try:
        try:
            raise KeyError("a")
        except KeyError as error:
            _, value, trace = sys.exc_info()
            raise ValueError(4).with_traceback(trace) from error
    except ValueError as error:
        error.__traceback__ = error.__cause__.__traceback__  # type: ignore[union-attr]
        found = error.args, type(error.__cause__).__name__, trace is not None
    return x + 1, found, value.args if value else None


@case()
def a_stack_of_exits(x: torch.Tensor, s: Any) -> Any:
    log: list[Any] = []

    @contextlib.contextmanager
    def noting(n: int) -> Any:
        log.append(f"in {n}")
        try:
            yield n
        except ValueError as error:
            log.append(repr(error))
            raise KeyError(n) from error
        finally:
            log.append(f"out {n}")

    try:
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(noting(i)) for i in range(2)]
            stack.callback(log.append, "called")
            stack.push(lambda kind, *rest: bool(log.append(kind.__name__)))
            stack.enter_context(torch.no_grad())
            y = x * 2
            raise ValueError(len(held))
    except KeyError as error:
        log.append((error.args, type(error.__cause__).__name__))
    with contextlib.ExitStack() as stack:
        stack.push(lambda *rest: True)
        raise ValueError
    return x + y, log


@case()
def streams_redirected(x: torch.Tensor, s: Any) -> Any:
    before = sys.stdout
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        y = x * 2
    held = [sys.stderr]
    held.insert(0, before)
    return y, sys.stdout is before, len(held)


@case()
def locks_of_its_own(x: torch.Tensor, s: Any) -> Any:
    class Held:
        @functools.cached_property
        def twice(self) -> torch.Tensor:
            return x * 2

    lock, again = threading.Lock(), threading.RLock()
    with lock, again, again:
        held = Held()
        y = held.twice + held.twice
    return y, held.twice is held.twice, lock.locked()


@case()
def classes_of_iterators(x: torch.Tensor, s: Any) -> Any:
    made = (
        zip([1], [2]), map(abs, [1]), filter(None, [1]), enumerate([1]), iter([1]), iter((1,)), reversed([1]),
        (i for i in [1]), iter({}), iter(range(3)), iter({}.items()),
        iter(int, 1), iter(Indexed()),
    )  # fmt: skip
    return x + 1, [m.__class__ for m in made], [m.__class__ is type(m) for m in made], [type(m).__name__ for m in made]


@pytest.mark.parametrize("found", cases_of(__name__))
def test_tracebacks(found: Case) -> None:
    check(found)


def test_a_stream_that_is_put_in_place_is_written_to() -> None:

    def program(x: torch.Tensor, into: io.StringIO) -> torch.Tensor:
        with contextlib.redirect_stdout(into):
            print("said")
        return x * 2

    into, x = io.StringIO(), torch.ones(2)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for _ in range(2):
        assert compiled(x, into).tolist() == [2, 2]
    assert into.getvalue() == "said\nsaid\n" and sys.stdout is not into
