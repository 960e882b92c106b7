"""Exceptions that leave compiled functions, and effects before them: as eager, with the user's lines."""

from __future__ import annotations

import copy
import inspect
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdynamo
from torchdynamo.api import owner_of

COUNTERS: dict[str, int] = {}
TOTAL = 0


class Box:
    """State of the outside."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.table: dict[str, Any] = {}
        self.count = 0


class Refused(Exception):
    """An exception with a constructor of its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Manager:
    """Notes what leaves its block; swallows what it is told to."""

    def __init__(self, box: Box, swallow: bool) -> None:
        self.box, self.swallow = box, swallow

    def __enter__(self) -> Box:
        self.box.items.append("enter")
        return self.box

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        print(end="")
        self.box.items.append(("exit", kind, str(error), None if trace is None else trace.tb_lineno))
        return self.swallow


def effects_before(x: torch.Tensor, box: Box) -> torch.Tensor:
    global TOTAL
    TOTAL += 1
    COUNTERS["before"] = COUNTERS.get("before", 0) + 1
    box.items.append(x.sin())
    box.count += 1
    box.table["a"] = 1
    raise Refused(3, "no")


def bad_shapes(x: torch.Tensor, box: Box) -> torch.Tensor:
    box.count += 1
    y = x.sin()
    box.items.append(y)
    return y @ torch.ones(7, 7)


def deep(x: torch.Tensor, box: Box) -> torch.Tensor:
    return deeper(x.cos(), box) + 1


def deeper(x: torch.Tensor, box: Box) -> torch.Tensor:
    box.count += 1
    print(end="")
    box.count += 1
    return x.view(7, 7)


def missing_key(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        box.items.append(1)
        return x * box.table["absent"]
    finally:
        box.items.append(2)


def raised_from(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        raise KeyError("inner")
    except KeyError as error:
        box.count += 1
        raise Refused(4, "outer") from error


def raised_again(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        deep(x, box)
    except RuntimeError:
        box.items.append(sys.exc_info()[0])
        print(end="")
        box.items.append(str(sys.exc_info()[1]))
        raise
    return x


def swallowed(x: torch.Tensor, box: Box) -> torch.Tensor:
    with Manager(box, True) as inner:
        inner.count += 1
        raise ValueError("gone")
    return x + box.count


def passed_through(x: torch.Tensor, box: Box) -> torch.Tensor:
    with Manager(box, False), Manager(box, False):
        box.count += 1
        bad_shapes(x, box)
    return x


def break_in_finally(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        x = x.sin()
        raise Refused(5, "while unwinding")
    finally:
        x = x + 1
        print(end="")
        box.items.append(x.cos())


def caught_outside(x: torch.Tensor, box: Box) -> torch.Tensor:
    for attempt in range(3):
        try:
            x = x + 1
            deeper(x, box) if attempt else break_in_finally(x, box)
        except Refused as error:
            x = x * error.code
        except RuntimeError as error:
            box.items.append(str(error))
        else:
            x = x * 100
    return x


def assertion(x: torch.Tensor, box: Box) -> torch.Tensor:
    y = x.sin()
    box.count += 1
    assert y.shape[0] == 9, f"rows: {y.shape[0]}"
    return y


def traceback_read(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        deep(x, box)
    except RuntimeError as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
        box.items.append(lines)
        box.items.append(traceback.format_exc().count("deeper"))
    return x.sin()


def chained_through_finally(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        return bad_shapes(x, box)
    except RuntimeError:
        try:
            raised_from(x, box)
        finally:
            print(end="")
            box.items.append(x.sin())
    return x


def chained_through_frames(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        chained_through_finally(x, box)
    except Refused:
        try:
            deep(x, box)
        except RuntimeError:
            missing_key(x, box)
    return x


def leaves_a_loop_within_blocks(x: torch.Tensor, box: Box) -> torch.Tensor:
    for step in (item for item in range(3)):
        with torch.enable_grad():
            box.count += step
            loses_a_key(x, box)
    return x


def loses_a_key(x: torch.Tensor, box: Box) -> None:
    with torch.no_grad():
        del box.table["absent"]


def passes_a_loop(x: torch.Tensor, box: Box) -> torch.Tensor:
    return leaves_a_loop_within_blocks(x, box) + 1


def raises_nothing(x: torch.Tensor, box: Box) -> torch.Tensor:
    raise


def raises_nothing_further_in(x: torch.Tensor, box: Box) -> torch.Tensor:
    box.count += 1
    return raises_nothing(x, box) + 1


def raises_what_it_kept(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        missing_key(x, box)
    except KeyError as error:
        kept = error
    print(end="")
    raise kept


class Ended(BaseException):
    """What handlers of Exception let pass, as they do SystemExit and CancelledError."""


def ends(x: torch.Tensor, box: Box) -> torch.Tensor:
    box.count += 1
    box.items.append(x.sin())
    sys.exit(3)


def ends_within_blocks(x: torch.Tensor, box: Box) -> torch.Tensor:
    kept = x.clone()
    try:
        with Manager(box, False):
            kept.add_(1)
            raise Ended("while it runs")
    except Exception:
        box.items.append("not here")
    finally:
        box.items.append(kept)
    return kept


def ends_further_in(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        ends_within_blocks(x, box)
    except Ended as error:
        box.items.append(str(error))
        raise KeyboardInterrupt from error
    return x


def end_is_caught(x: torch.Tensor, box: Box) -> torch.Tensor:
    try:
        ends(x, box)
    except SystemExit as error:
        return x * error.code
    return x


PROGRAMS = [
    ends, ends_within_blocks, ends_further_in, end_is_caught,
    effects_before, bad_shapes, deep, missing_key, raised_from, raised_again, swallowed, passed_through,
    break_in_finally, caught_outside, assertion, traceback_read, chained_through_finally, chained_through_frames,
    leaves_a_loop_within_blocks, passes_a_loop, raises_nothing, raises_nothing_further_in, raises_what_it_kept,
]  # fmt: skip


def chain(error: BaseException | None) -> Any:
    """An exception with those behind it."""
    return error and (type(error), str(error), vars(error), chain(error.__cause__), chain(error.__context__))


def outcome(program: Callable[..., Any], x: torch.Tensor, box: Box) -> tuple[Any, ...]:
    """What a call did: its result or its exception with chain and lines, and every effect."""
    global TOTAL
    TOTAL = 0
    COUNTERS.clear()
    try:
        result: Any = ("returned", program(x, box))
    except BaseException as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__][1:]
        result = ("raised", chain(error), lines)
    return (result, box.items, box.table, box.count, TOTAL, dict(COUNTERS))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_a_call_did_before_its_exception(program: Callable[..., Any]) -> None:
    x = torch.randn(4, 4)
    expected = outcome(program, x, Box())
    options = torchdynamo.CaptureOptions(strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for call in range(4):
        found = outcome(compiled, x, Box())
        assert same(found, expected), f"call {call}:\n{found}\n{expected}"
    fallbacks = owner_of(compiled).stats.fallbacks  # the test runner's own code explains assertions
    assert not [event for event in fallbacks if not any("_pytest" in frame.file for frame in event.frames)]


def test_a_function_that_raises_is_compiled_up_to_the_raise() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torchdynamo.optimize(backend, options=torchdynamo.CaptureOptions(strict=True))(bad_shapes)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            compiled(torch.ones(2, 2), Box())
    assert len(graphs) == 1
    assert [found.reason for found in owner_of(compiled).stats.break_details] == ["exception"]


def test_a_whole_graph_raises_what_the_program_raises() -> None:
    options = torchdynamo.CaptureOptions(fullgraph=True, strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(bad_shapes)
    for _ in range(3):
        box = Box()
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            compiled(torch.ones(2, 2), box)
        assert box.count == 1 and len(box.items) == 1


def test_effects_on_every_kind_of_place_in_order_across_breaks() -> None:
    log: list[str] = []

    class Noting:
        def __setattr__(self, name: str, value: Any) -> None:
            log.append(name)
            object.__setattr__(self, name, value)

    def program(x: torch.Tensor, box: Box, queue: list[Any]) -> torch.Tensor:
        global TOTAL
        count = 0

        def bump() -> None:
            nonlocal count
            count += 1

        noting = Noting()
        TOTAL = 1
        queue.append(x + 1)
        noting.first = 1
        bump()
        box.table["k"] = queue
        print(end="")
        TOTAL += count
        noting.second = 2
        queue[0] = queue[0] * 2
        del box.table["k"]
        bump()
        print(end="")
        box.count = count
        box.items = queue
        return x + count + TOTAL

    for wrap in (lambda f: f, torchdynamo.optimize(lambda graph, inputs: graph.forward)):
        log.clear()
        queue: list[Any] = []
        box = Box()
        result = wrap(program)(torch.zeros(2), box, queue)
        assert torch.equal(result, torch.full((2,), 4.0)) and TOTAL == 2 and log == ["first", "second"]
        assert box.items is queue and torch.equal(queue[0], torch.full((2,), 2.0)) and not box.table
        assert box.count == 2


def test_arguments_are_left_as_eager_leaves_them() -> None:
    def program(values: list[torch.Tensor]) -> torch.Tensor:
        values[0].add_(1)
        values.append(values[0] * 2)
        values[0].mul_(3)
        raise Refused(1, str(len(values)))

    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    for _ in range(3):
        eager, own = [torch.ones(2)], [torch.ones(2)]
        for run, values in ((program, eager), (compiled, own)):
            with pytest.raises(Refused, match="1: 2"):
                run(values)
        assert same(eager, own), copy.copy(own)


@pytest.mark.parametrize("policy", ["error", "continue"])
def test_a_limit_that_a_continuation_meets_leaves_the_open_blocks(policy: Any) -> None:
    log: list[str] = []

    def program(x: torch.Tensor, named: types.SimpleNamespace) -> torch.Tensor:
        try:
            with torch.no_grad():
                print(end="")
                return x + len(named.text)
        finally:
            log.append(f"left with {torch.is_grad_enabled()}")

    options = torchdynamo.CaptureOptions(recompile_limit=1, on_recompile=policy)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    for text in ("a", "bb", "ccc"):
        try:
            assert compiled(torch.zeros(2), types.SimpleNamespace(text=text)).tolist() == [len(text)] * 2
        except torchdynamo.errors.RecompileLimitExceeded:
            assert policy == "error" and text != "a"
        else:
            assert policy == "continue" or text == "a"
        assert log.pop() == "left with True" and not log and torch.is_grad_enabled()


def passes_a_finally(x: torch.Tensor) -> torch.Tensor:
    try:
        x = x + 1
        raise Refused(1, "here")
    finally:
        x = x.sin()


def passes_a_handler(x: torch.Tensor) -> torch.Tensor:
    try:
        raise Refused(1, "here")
    except KeyError:
        x = x + 1
    return x


def passes_two_blocks(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.enable_grad():
        x = x + 1
        raise Refused(1, "here")


def passes_from_further_in(x: torch.Tensor) -> torch.Tensor:
    try:
        return passes_a_finally(x)  # here
    finally:
        del x


@pytest.mark.parametrize("program", [passes_a_finally, passes_a_handler, passes_two_blocks, passes_from_further_in])
def test_the_line_that_is_told_is_that_of_the_raise(program: Callable[..., Any]) -> None:
    """Behind a `finally`, a handler of something else or the end of a `with` an exception goes on without a line."""
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward)(program)
    with pytest.raises(Refused):
        compiled(torch.ones(2))
    (event,) = owner_of(compiled).stats.ledger.events
    first = program.__code__.co_firstlineno
    lines = inspect.getsource(program).splitlines()
    assert event.frames[-1].line == first + next(i for i, line in enumerate(lines) if "here" in line)
