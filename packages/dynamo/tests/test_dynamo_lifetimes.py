"""What a program gives up is gone when its call is over, without the garbage collector, as in eager."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdynamo


class Held:
    """An argument whose end can be observed."""

    def __init__(self) -> None:
        self.items = [1, 2]

    def refuse(self) -> None:
        raise KeyError("refused")


def running(held: Held, log: list[str]) -> Iterator[int]:
    """A generator that no graph may advance."""
    try:
        for item in held.items:
            print(end="")
            yield item
    finally:
        log.append("closed")


def returns(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    return x + len(held.items)


def breaks(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    x = x + 1
    print(end="")
    return x + len(held.items)


def fails(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    return x + held.items[9]


def fails_inside(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    held.refuse()
    return x


def fails_in_torch(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    return x @ torch.ones(7, 7)


def fails_behind_a_break(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    print(end="")
    return x + held.items[9]


def fails_in_a_loop_over_a_generator(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    for _ in running(held, log):
        x = x + held.items[9]
    return x


def leaves_a_generator(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    for item in running(held, log):
        x = x + item
        if item:
            break
    return x


def breaks_in_a_handler(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    try:
        held.refuse()
    except KeyError:
        print(end="")
        x = x + 1
    return x


def handles_a_failing_loop(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    try:
        for _ in running(held, log):
            held.refuse()
    except KeyError as error:
        log.append(f"handled {error}")
    return x * 2


def raises_another(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    try:
        held.refuse()
    except KeyError as error:
        raise ValueError("another") from error
    return x


def fails_in_a_handler_behind_a_break(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    try:
        held.refuse()
    except KeyError:
        print(end="")
        return x + held.items[9]
    return x


def breaks_in_finally(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    try:
        x = x + held.items[9]
    finally:
        print(end="")
        log.append("finally")
    return x


def catches_and_goes_on(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    for index in range(4):
        try:
            x = x + held.items[index]
        except IndexError:
            x = x - 1
    return x


PROGRAMS = (
    returns, breaks, fails, fails_inside, fails_in_torch, fails_behind_a_break, fails_in_a_loop_over_a_generator,
    leaves_a_generator, breaks_in_a_handler, handles_a_failing_loop, raises_another, fails_in_a_handler_behind_a_break,
    breaks_in_finally, catches_and_goes_on,
)  # fmt: skip


def _call(function: Callable[..., Any], log: list[str]) -> weakref.ref[Held]:
    held = Held()
    try:
        log.append(str(function(torch.ones(3), held, log).tolist()))
    except (IndexError, KeyError, ValueError, RuntimeError) as error:
        log.append(type(error).__name__)
    return weakref.ref(held)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_nothing_outlives_its_call(program: Callable[..., Any]) -> None:
    torchdynamo.optimize(lambda graph, inputs: graph.forward)(returns)(torch.ones(3), Held(), [])  # what is made once
    options = torchdynamo.CaptureOptions(strict=True)
    compiled = torchdynamo.optimize(lambda graph, inputs: graph.forward, options=options)(program)
    gc.collect()
    gc.disable()
    try:
        for call in range(4):
            expected, log = [], []
            assert _call(program, expected)() is None, "the program itself keeps it"
            kept = _call(compiled, log)
            assert kept() is None, f"call {call}: the argument is still alive"
            assert sorted(log) == sorted(expected), f"call {call}"
    finally:
        gc.enable()
