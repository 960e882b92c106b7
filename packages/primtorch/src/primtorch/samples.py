"""Samples of operators: calls to test them with, declared in few words beside formulas, refusals and rules.

Nothing is drawn until a sample is: `call(reals(2, 3), 1)` describes arguments, its `draw()` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload

from primtorch.frozen import record

Arguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
"""Positional ones, and those by name."""


@record
class Drawn:
    """A tensor that is drawn when the sample is."""

    draw: Callable[[], torch.Tensor]


@record
class Call:
    """Arguments by position and by name: values, and in their places what is drawn."""

    args: tuple[object, ...]
    kwargs: dict[str, object]

    def draw(self) -> Arguments:
        """The arguments, drawn from torch's generator."""
        return drawn(self.args), {name: drawn(value) for name, value in self.kwargs.items()}


def call(*args: object, **kwargs: object) -> Call:
    """A sample: a call with these arguments."""
    return Call(args, kwargs)


def reals(*shape: int, low: float = -2.0, high: float = 2.0, dtype: torch.dtype = torch.float32) -> Drawn:
    """Values in [low, high), of a complex dtype in both parts."""

    def part() -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64) * (high - low) + low

    return Drawn(lambda: (torch.complex(part(), part()) if dtype.is_complex else part()).to(dtype))


def integers(*shape: int, below: int = 6, dtype: torch.dtype = torch.int64) -> Drawn:
    """Integers in [0, below)."""
    return Drawn(lambda: torch.randint(0, below, shape).to(dtype))


def truths(*shape: int) -> Drawn:
    """Drawn booleans of a shape."""
    return Drawn(lambda: torch.rand(shape) < 0.5)


def listed(*values: object, dtype: torch.dtype | None = None) -> Drawn:
    """A vector of these values, or a matrix of these rows."""
    return Drawn(lambda: torch.tensor(values, dtype=dtype))


def matrix(*shape: int) -> Drawn:
    """Drawn float64 numbers of a shape."""
    return reals(*shape, dtype=torch.float64)


def positive(size: int = 4) -> Drawn:
    """A symmetric matrix whose eigenvalues are above 1."""

    def draw() -> torch.Tensor:
        root = matrix(size, size).draw()
        return root @ root.t() + size * torch.eye(size, dtype=torch.float64)

    return Drawn(draw)


def after(function: Callable[[torch.Tensor], Any], operand: Drawn) -> Drawn:
    """What a function makes of a drawn tensor."""
    return Drawn(lambda: function(operand.draw()))


def drawn(value: object) -> Any:
    """The value with a tensor where one is drawn."""
    if isinstance(value, Drawn):
        return value.draw()
    if isinstance(value, (list, tuple)):
        return type(value)(map(drawn, value))
    return value


_USUAL: dict[tuple[str, str], object] = {
    ("Tensor", ""): reals(3, 4, low=0.1, high=0.9),
    ("number", ""): 2,
    ("bool", ""): False,
    ("float", ""): 0.5,
    ("int", "dim"): 1,
    ("List[int]", "dim"): [1],
    ("List[int]", "dims"): [1],
    ("List[int]", "size"): [3, 4],
    ("List[Tensor]", "tensors"): [reals(3, 4), reals(3, 4)],
    ("int", "reduction"): 1,
}
"""What an argument without a default is, by type and, where the type leaves it open, by name."""


def usual(overload: OpOverload) -> Iterator[Call]:
    """The sample of an operator that has none of its own, unless it takes what has no usual value."""
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for argument in overload._schema.arguments:
        if argument.has_default_value():
            continue
        kind = str(argument.type)
        if kind.startswith("Optional"):
            value = None
        else:
            value = _USUAL.get((kind, ""), _USUAL.get((kind, argument.name), argument))
        if value is argument:
            return
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    yield Call(tuple(args), kwargs)
