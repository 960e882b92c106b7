"""Context managers, exceptions and what is written outside."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .record import PYTHON, Program, maker, part


@maker(PYTHON, "a user's context manager with state")
def contexts() -> Program:
    log: list[int] = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        log.append(len(log))
        try:
            yield
        finally:
            log.append(-1)

    def program(x: torch.Tensor) -> Any:
        with noted():
            y = x * len(log)
        return y + log[-1]

    return program


@part(PYTHON, "exceptions")
def catching(x: torch.Tensor) -> Any:
    try:
        {}["missing"]
    except KeyError as error:
        return x * len(error.args)
    return x


@part(PYTHON, "warnings", gradient=False)
def warning(x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("from the program", stacklevel=1)
        return x + 1


@part(
    PYTHON,
    "warnings that the program collects",
    "ambient_state",
    gradient=False,
    why="warnings are given behind the graph, and the program reads what has been collected before; instead: collect"
    " them around the compiled function",
)
def collecting(x: torch.Tensor) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.warn("first", stacklevel=1)
        warnings.warn("second", stacklevel=1)
        return x * len(told) + len(str(told[0].message))


@part(PYTHON, "ExitStack, suppress, nullcontext and closing", gradient=False)
def contexts_of_the_library(x: torch.Tensor) -> Any:
    log: list[int] = []

    def steps() -> Iterator[torch.Tensor]:
        try:
            yield x
        finally:
            log.append(2)

    with contextlib.ExitStack() as outer:
        outer.enter_context(torch.no_grad())
        outer.callback(log.append, 1)
        kept = outer.pop_all()
    with kept, contextlib.suppress(KeyError), contextlib.nullcontext(3) as three, contextlib.closing(steps()) as begun:
        y = next(begun) * three
        {}[0]
    return y, len(log)


@part(
    PYTHON,
    "print",
    "print",
    gradient=False,
    why="what is printed is a tensor's data, in the order in which the program does; instead: print what the function"
    " returns",
)
def printing(x: torch.Tensor) -> Any:
    y = x + 1
    print(end="")
    return y * 2


@part(PYTHON, "a torch-function mode")
def under_mode(x: torch.Tensor) -> Any:
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    with Doubling():
        return torch.sin(x)


@part(PYTHON, "autocast", gradient=False)
def autocasting(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.float() @ x.float().mT).float()
