"""What users say of the sizes of their tensors: symbols from the first capture on, within a range, or constants."""

from __future__ import annotations

import builtins
import enum
from collections.abc import Mapping

import torch

from primtorch.frozen import record
from torchdynamo import torch_compilers_marks


class SizeKind(enum.Enum):
    """What a size is to be."""

    DYNAMIC = "dynamic"  # a symbol; a program that needs one size only is an error
    MAYBE_DYNAMIC = "maybe dynamic"  # a symbol where it can be
    STATIC = "static"  # a constant


@record
class SizeMark:
    """A user's word on one size: `low` to `high`, None where nothing was promised."""

    kind: SizeKind
    low: int | None = None
    high: int | None = None


SMALLEST = 2  # sizes 0 and 1 mean something of their own: emptiness, broadcasting


def size_marks(tensor: torch.Tensor) -> Mapping[int, SizeMark]:
    """The marks of a tensor, by dimension."""
    own: Mapping[int, SizeMark] = getattr(tensor, "_torchdynamo_sizes", {})
    foreign = {
        dim % tensor.dim(): SizeMark(SizeKind(kind), None if low is None else max(low, SMALLEST), high)
        for kind, dim, low, high in torch_compilers_marks.sizes(tensor)
    }
    return {**foreign, **own} if foreign else own


def mark_dynamic(
    tensor: torch.Tensor, dim: int | tuple[int, ...], min: int | None = None, max: int | None = None
) -> None:
    """The sizes of `tensor` at `dim` are symbolic from the first capture on: one compiled version serves them all.

    Args:
        min, max: the sizes that will come, bounds included: the compiled version serves all of them, and no others.
            Sizes 0 and 1, where `min` allows them, have compiled versions of their own.

    Raises:
        IndexError: the tensor has no such dimension.
        ValueError: the range is empty or below 2, the tensor's own size is not in it, or that size is 0 or 1 and
            `min` says nothing of such sizes.
        SizeNotDynamic: at a call, where the program takes one size only, or not all of a promised range.
    """
    if max is not None and max < SMALLEST:
        raise ValueError(f"max={max}: sizes below {SMALLEST} are never symbolic")
    if min is not None and max is not None and min > max:
        raise ValueError(f"min={min} is above max={max}")
    low = None if min is None else builtins.max(min, SMALLEST)
    kinds = {}
    for place in _dims(tensor, dim):
        size = tensor.shape[place]
        if (min is not None and size < min) or (max is not None and size > max):
            raise ValueError(f"the size at dim {place} is {size}, not within min={min}, max={max}")
        if size < SMALLEST and min is None:
            raise ValueError(
                f"the size at dim {place} is {size}: sizes below {SMALLEST} are not symbolic; use maybe_mark_dynamic, "
                "or say min=0, which gives them compiled versions of their own"
            )
        kinds[place] = SizeKind.MAYBE_DYNAMIC if size < SMALLEST else SizeKind.DYNAMIC
    for place, kind in kinds.items():
        _mark(tensor, place, SizeMark(kind, low, max))


def maybe_mark_dynamic(tensor: torch.Tensor, dim: int | tuple[int, ...]) -> None:
    """The sizes of `tensor` at `dim` are symbolic where the program can do with that: nothing is promised.

    Raises:
        IndexError: the tensor has no such dimension.
    """
    _mark(tensor, dim, SizeMark(SizeKind.MAYBE_DYNAMIC))


def mark_unbacked(tensor: torch.Tensor, dim: int | tuple[int, ...]) -> None:
    """`mark_dynamic`, by the name of torch.compile's mark for sizes of which nothing is assumed. Sizes 0 and 1 have
    compiled versions of their own.

    Raises:
        IndexError: the tensor has no such dimension.
        SizeNotDynamic: at a call, where the program takes one size only.
    """
    for place in _dims(tensor, dim):
        kind = SizeKind.DYNAMIC if tensor.shape[place] >= SMALLEST else SizeKind.MAYBE_DYNAMIC
        _mark(tensor, place, SizeMark(kind))


def mark_static(tensor: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> None:
    """The sizes of `tensor` at `dim` (all, when None) stay constants: each has a compiled version of its own.

    Raises:
        IndexError: the tensor has no such dimension.
    """
    _mark(tensor, tuple(range(tensor.dim())) if dim is None else dim, SizeMark(SizeKind.STATIC))


def _dims(tensor: torch.Tensor, dim: int | tuple[int, ...]) -> tuple[int, ...]:
    dims = (dim,) if isinstance(dim, int) else dim
    for d in dims:
        if not -tensor.dim() <= d < tensor.dim():
            raise IndexError(f"dim {d} of a tensor with {tensor.dim()} dimensions")
    return tuple(d % tensor.dim() for d in dims)


def _mark(tensor: torch.Tensor, dim: int | tuple[int, ...], mark: SizeMark) -> None:
    marks = {**size_marks(tensor), **dict.fromkeys(_dims(tensor, dim), mark)}
    tensor._torchdynamo_sizes = marks  # type: ignore[attr-defined]
