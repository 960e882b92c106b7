"""Where the values of a call come from: leaves of its arguments, results of the graph, numbers that the call tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from primtorch.frozen import record
from primtorch.symbolic.expr import Program


@record
class Leaf:
    """A leaf of the call's arguments, by its place."""

    index: int


@record
class State:
    """A tensor that the function reads from elsewhere: a parameter, a buffer, a global."""

    name: str


@record
class Result:
    """What the graph returns at a place."""

    index: int


@record
class Number:
    """A number computed from those that the call tells: a postfix program of `primtorch.symbolic` over their names or
    places."""

    program: Program


# How a number is read off a tensor or a number, by its kind.
MEASURES: Mapping[str, Callable[[Any, int], int | float]] = {
    "size": lambda tensor, dim: tensor.shape[dim],
    "stride": lambda tensor, dim: tensor.stride(dim),
    "offset": lambda tensor, dim: tensor.storage_offset(),
    "value": lambda number, dim: number,
}


@record
class Measure:
    """A number that a call tells: a size, a stride or the offset of a tensor, or a number among the arguments."""

    of: Leaf | State
    kind: str  # of MEASURES
    dim: int = 0

    def read(self, value: object) -> int | float:
        """The number, of what stands at `of` in a call."""
        return MEASURES[self.kind](value, self.dim)
