"""What the tables of functions are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import SupportsIndex

import torch

from primtorch.frozen import record
from torchdynamo.arrays.values import arrays_in
from torchdynamo.reasons import BreakGraph

Axis = int | tuple[int, ...] | None


@record
class Rule:
    """How a function of NumPy, or a method of arrays, is done to tensors.

    Attributes:
        program: called with the world of arrays, what NumPy gave for the models, and the arguments of the call. Its
            parameters are NumPy's, as far as it takes them. It gives tensors, or arrays that it made itself.
        asks: what NumPy is asked in the place of the function, where models are not what it takes.
        writes: the first argument is written to.
    """

    program: Callable[..., object]
    asks: Callable[[Callable[..., object]], Callable[..., object]] | None = None
    writes: bool = False


# Their results have as many elements as the data says.
SIZED_BY_DATA = frozenset(
    {
        "argwhere", "bincount", "compress", "extract", "flatnonzero", "histogram", "histogram_bin_edges", "in1d",
        "intersect1d", "nonzero", "setdiff1d", "setxor1d", "trim_zeros", "union1d", "unique", "unique_all",
        "unique_counts", "unique_inverse", "unique_values", "where",
    }
)  # fmt: skip


# Parameters of NumPy's whose values, beside those of the operands, decide what shape or type a result has, or whether
# NumPy takes the call at all: models say nothing of them.
_DECIDING = frozenset(
    {
        "N", "axes", "axis", "axis1", "axis2", "copy", "ddof", "decimals", "deg", "destination", "dtype", "endpoint",
        "full_matrices", "increasing", "indexing", "indices_or_sections", "k", "keepdims", "kind", "mode", "n", "norm",
        "num", "offset", "ord", "order", "p", "pad_width", "repeats", "reps", "right", "s", "shape", "shift", "side",
        "source", "spacing", "stable",
    }
)  # fmt: skip


def refuse_unknown(arguments: Mapping[str, object]) -> None:
    """Breaks the graph where an argument that decides is not known, before NumPy is asked."""
    for name, value in arguments.items():
        if name in _DECIDING:
            known(value)


def refusal(function: str, of: str = "numpy.") -> BreakGraph:
    """The break at a function, or a method, that no rule knows with its arguments."""
    if function in SIZED_BY_DATA:
        twin = {"argwhere": "nonzero", "flatnonzero": "nonzero", "where": "nonzero"}.get(function, function)
        instead = f"; torch.{twin} of a tensor stays in the graph" if hasattr(torch, twin) else ""
        return BreakGraph("data_dependent_shape", f"{of}{function}(): the data says how long its result is{instead}")
    return BreakGraph("numpy", f"call of {of}{function}" if of else f"{function}() of an array")


def known(*values: object) -> None:
    """Breaks the graph where an argument that decides about shapes is not known."""
    if arrays_in(values):
        raise BreakGraph("data_dependent_shape", "a size, an axis or a count that is in an array")


def dims(axis: Axis, tensor: torch.Tensor) -> tuple[int, ...]:
    """The dims of a reduction."""
    if axis is None:
        return tuple(range(tensor.dim()))
    return tuple(int(one) for one in axis) if isinstance(axis, (tuple, list)) else (int(axis),)


def dim_of(axis: SupportsIndex) -> int:
    """The axis as a number."""
    return int(axis)


def truths(x: torch.Tensor) -> torch.Tensor:
    """The truth of each element."""
    return x if x.dtype == torch.bool else x != 0


def refuse_complex(x: torch.Tensor) -> None:
    """Breaks the graph where complex numbers are ordered, which NumPy does and torch does not."""
    if x.is_complex():
        raise BreakGraph("numpy", "the order of complex numbers")
