"""Delta debugging: the smallest part of a program that still shows a fault.

Each step proposes parts of the program in hand, and takes the first that shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from torchcompile.faults.edit import part, plain, resized, tensors_of, up_to, values_of
from torchcompile.faults.schemas import Program

Shows = Callable[[Program], bool]
Progress = Callable[[str], None]  # is told of each step


def _silent(text: str) -> None:
    """Nobody looks on."""


@dataclass
class Reduction:
    """One reduction. It ends after `tries` proposals or `seconds`, with what it has by then.

    Attributes:
        shows: whether a program still shows the fault. What it raises counts as no.
    """

    shows: Shows
    progress: Progress = _silent
    tries: int = 400
    seconds: float = 300.0
    steps: Steps | None = None
    _tried: int = field(default=0, init=False)
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    def __call__(self, program: Program) -> Program:
        for name, step in self.steps or STEPS:
            for smaller in step(self, program):
                program = smaller
                self.progress(f"{name}: {len(program.calls)} operators left after {self._tried} tries")
        return program

    def accepts(self, make: Callable[..., Program], *args: object, **kwargs: object) -> Program | None:
        """What `make` gives of these, if it can be made, and shows the fault."""
        if self._tried >= self.tries or time.monotonic() > self._end:
            return None
        self._tried += 1
        try:
            program = make(*args, **kwargs)
            return program if self.shows(program) else None
        except Exception:  # it is no program
            return None


def first_difference(program: Program, reduction: Reduction) -> tuple[Program, str] | None:
    """The shortest beginning of a program that shows the fault, and the operator that it ends with.

    None if that shows it nowhere: neither where each value is given out, nor where the last one is.
    """
    values = values_of(program)
    names = tensors_of(program, values)
    for everything in (True, False):
        low, high, found = 0, len(names), None  # beginnings up to `low` are right, that up to `high` is not
        while low < high:
            middle = (low + high) // 2
            shown = reduction.accepts(up_to, program, values, middle, everything)
            if shown is None:
                low = middle + 1
            else:
                high, found = middle, shown
        if found is not None:
            return found, names[low]
    return None


def _plain(reduction: Reduction, program: Program) -> Iterator[Program]:
    smaller = reduction.accepts(plain, program)
    if smaller is not None:
        yield smaller


def _beginning(reduction: Reduction, program: Program) -> Iterator[Program]:
    """The shortest beginning; of it, what one result needs."""
    found = first_difference(program, reduction)
    if found is not None:
        program, name = found
        yield program
        values = values_of(program)
        smaller = reduction.accepts(part, program, values, outputs=[name])
        if smaller is not None:
            yield smaller


def _ending(reduction: Reduction, program: Program) -> Iterator[Program]:
    """The last operators alone: one, two, four, ..."""
    values = values_of(program)
    names = tensors_of(program, values)
    length = 1
    while length < len(names):
        earlier = names[:-length]
        smaller = reduction.accepts(part, program, values, as_inputs=earlier)
        if smaller is not None:
            yield smaller
            return
        length *= 2


def _fewer(reduction: Reduction, program: Program) -> Iterator[Program]:
    """Halves, quarters, ..., single operators less, until none can go: as inputs, or removed where unread."""
    size = max(1, len(program.calls) // 2)
    while True:
        shrunk = False
        for start in range(0, len(program.calls), size):
            values = values_of(program)
            chosen = program.calls[start : start + size]
            tensors = [n.name for n in chosen if n.users and isinstance(values[n.name], torch.Tensor)]
            unread = [n.name for n in chosen if not n.users]
            smaller = reduction.accepts(part, program, values, as_inputs=tensors, removed=unread)
            if smaller is not None and len(smaller.calls) < len(program.calls):
                program, shrunk = smaller, True
                yield program
        if not shrunk and size == 1:
            return
        size = size if shrunk and size == 1 else max(1, size // 2)


def _results(reduction: Reduction, program: Program) -> Iterator[Program]:
    """One result less, as long as there are several."""
    (end,) = program.module.graph.find_nodes(op="output")
    names = [str(n) for n in end.all_input_nodes]
    for name in list(names):
        if len(names) > 1:
            values, left = values_of(program), [other for other in names if other != name]
            smaller = reduction.accepts(part, program, values, outputs=left)
            if smaller is not None:
                program, names = smaller, left
                yield program


def _sizes(reduction: Reduction, program: Program) -> Iterator[Program]:
    """Smaller numbers, in shapes and arguments at once."""
    for before in _numbers(program.inputs):
        for after in (2, 3, before // 2):
            if 1 < after < before:
                smaller = reduction.accepts(resized, program, before, after)
                if smaller is not None:
                    program = smaller
                    yield program
                    break


def _numbers(inputs: Sequence[object]) -> list[int]:
    found = {size for value in inputs if isinstance(value, torch.Tensor) for size in value.shape}
    return sorted((size for size in found if size > 2), reverse=True)


def _gradients(reduction: Reduction, program: Program) -> Iterator[Program]:
    """Inputs of which no gradient is asked."""
    for place, value in enumerate(program.inputs):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            inputs = (*program.inputs[:place], value.detach(), *program.inputs[place + 1 :])
            smaller = reduction.accepts(Program, program.module, inputs)
            if smaller is not None:
                program = smaller
                yield program


Steps: TypeAlias = Sequence[tuple[str, Callable[[Reduction, Program], Iterator[Program]]]]
STEPS: Steps = (
    ("sizes and constants", _plain),
    ("the first operator that differs", _beginning),
    ("what it needs of the rest", _ending),
    ("operator by operator", _fewer),
    ("results", _results),
    ("sizes", _sizes),
    ("gradients", _gradients),
)
BELOW: Steps = STEPS[1:5]  # for a graph of which every size is written out
