"""What a program gives up is gone where eager lets go of it, or when the call is over, without the garbage collector."""

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


def catches_around_a_loop(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    try:
        for _ in running(held, log):
            held.refuse()
    finally:
        log.append("finally")
    return x


def loop_that_fails(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    for item in running(held, log):
        x = x + item
        held.refuse()
    return x


def handles_for_another_frame(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    try:
        x = loop_that_fails(x, held, log)
    except KeyError:
        log.append("handled")
    log.append("behind")
    return x


def returns_within_a_loop(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    for item in running(held, log):
        log.append("round")
        if item == 2:
            return x * item
    return x


def goes_on_behind_another_loop(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    x = returns_within_a_loop(x, held, log)
    log.append("behind")
    return x


def keeps_one_in_a_variable(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    generator = running(held, log)
    log.append(str(next(generator)))
    print(end="")
    log.append("behind")
    return x + 1


def outlives_another_frame(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    x = keeps_one_in_a_variable(x, held, log)
    log.append("outside")
    x = x + 1
    print(end="")
    log.append("end")
    return x


def exchanges_a_variable(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    generator: Any = running(held, log)
    next(generator)
    print(end="")
    log.append("before")
    generator = running(held, log)
    log.append("exchanged")
    next(generator)
    log.append("again")
    del generator
    log.append("deleted")
    return x


def fails_with_one_in_a_variable(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    generator = running(held, log)
    next(generator)
    print(end="")
    log.append("before")
    held.refuse()
    return x


def counts_rounds(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    for number, item in enumerate(running(held, log)):
        log.append(f"round {number}")
        if item == 2:
            break
    log.append("behind")
    return x


def raises_through_finally(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    try:
        for item in running(held, log):
            try:
                print(end="")
                raise KeyError(item)
            finally:
                log.append("finally")
    except KeyError as error:
        log.append(f"handled {error}")
        print(end="")
        log.append("behind")
    return x


def advances_from_two_frames(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    generator = running(held, log)
    for _ in generator:
        try:
            log.append(str(next(generator)))
            held.refuse()
        except KeyError:
            log.append("handled")
    log.append("behind")
    return x


def delegates(held: Held, log: list[str]) -> Iterator[int]:
    for item in running(held, log):
        yield item + 1


def leaves_one_within_another(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    for item in delegates(held, log):
        x = x + item
        break
    log.append("behind")
    return x + x.sum().item()


def without_gradients(x: torch.Tensor) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        yield x * 2
        yield x * 3


def suspends_within_no_grad(x: torch.Tensor, held: Held, log: list[str]) -> torch.Tensor:
    generator = without_gradients(x)
    x = x + next(generator)
    print(end="")
    x = x + next(generator, 1)
    log.append(str(torch.is_grad_enabled()))
    if x.sum() > 0:
        del generator
    log.append(str(torch.is_grad_enabled()))
    held.refuse()
    return x


PROGRAMS = (
    returns, breaks, fails, fails_inside, fails_in_torch, fails_behind_a_break, fails_in_a_loop_over_a_generator,
    leaves_a_generator, breaks_in_a_handler, handles_a_failing_loop, raises_another, fails_in_a_handler_behind_a_break,
    breaks_in_finally, catches_and_goes_on, catches_around_a_loop, loop_that_fails, handles_for_another_frame,
    returns_within_a_loop, goes_on_behind_another_loop, keeps_one_in_a_variable, outlives_another_frame,
    exchanges_a_variable, fails_with_one_in_a_variable, counts_rounds, raises_through_finally,
    advances_from_two_frames, leaves_one_within_another, suspends_within_no_grad,
)  # fmt: skip


def _call(function: Callable[..., Any], log: list[str]) -> weakref.ref[Held]:
    held = Held()
    try:
        log.append(str(function(torch.ones(3), held, log).tolist()))
    except (IndexError, KeyError, ValueError, RuntimeError) as error:
        log.append(type(error).__name__)
    log.append(str(torch.is_grad_enabled()))
    return weakref.ref(held)


@pytest.mark.usefixtures("collector_of_new_objects")
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
            assert log == expected, f"call {call}"
    finally:
        gc.enable()
