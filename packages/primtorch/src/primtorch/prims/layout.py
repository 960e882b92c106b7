"""Strides of results, by the rules eager's iterators follow, for concrete and symbolic sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from primtorch.spec import TensorSpec


def _contiguous(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    strides: list[Any] = []
    running: Any = 1
    for size in reversed(shape):
        strides.append(running)
        if not (isinstance(size, int) and size <= 1):
            running = running * size
    strides.reverse()
    return tuple(strides)


_contiguous_of_ints = lru_cache(maxsize=65536)(_contiguous)


def contiguous_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Row-major strides; an empty dimension counts as one, as eager's do."""
    shape = tuple(shape)
    for size in shape:
        if type(size) is not int:
            return _contiguous(shape)
    return _contiguous_of_ints(shape)


def _same_but_for_ones(shape: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> bool:
    """The stride of a dimension with one element is never asked for: it may hang on a size that depends on data."""
    for size, x, y in zip(shape, a, b, strict=True):
        if x is y or (type(size) is int and size == 1):
            continue
        if not (x == y or size == 1):
            return False
    return True


def is_contiguous(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    if any(isinstance(size, int) and size == 0 for size in shape):
        return True
    return _same_but_for_ones(shape, strides, contiguous_strides(shape))


def channels_last_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Strides of (N, C, *spatial) with the channel innermost."""
    rank = len(shape)
    order = (0, *range(2, rank), 1)
    return strides_in_order(shape, order)


def is_channels_last(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Eager's test: a size-1 dimension does not decide, except that a contiguous tensor is not channels-last."""
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least: Any = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least:
            return False
        if dim == 0 and least == strides[1]:
            return False
        least = strides[dim]
        if shape[dim] > 1:
            least = least * shape[dim]
    return True


def strides_in_order(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Dense strides with `order` listing the dimensions from outermost to innermost."""
    strides: list[Any] = [1] * len(shape)
    running: Any = 1
    for dim in reversed(order):
        strides[dim] = running
        if not (isinstance(shape[dim], int) and shape[dim] <= 1):
            running = running * shape[dim]
    return tuple(strides)


def is_dense(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether every element lies at its own place and there are no holes."""
    if any(isinstance(size, int) and size == 0 for size in shape):
        return True
    dims = sorted(
        (d for d in range(len(shape)) if not (isinstance(shape[d], int) and shape[d] == 1)), key=_StrideKey.of(strides)
    )
    running: Any = 1
    for dim in dims:
        if strides[dim] is not running and strides[dim] != running:
            return False
        running = running * shape[dim]
    return True


class _StrideKey:
    """Orders symbolic strides by asking `<` only, which records a guard where it is not known."""

    __slots__ = ("stride",)

    def __init__(self, stride: Any) -> None:
        self.stride = stride

    def __lt__(self, other: _StrideKey) -> bool:
        return bool(self.stride < other.stride)

    @staticmethod
    def of(strides: Sequence[Any]) -> Any:
        return lambda dim: _StrideKey(strides[dim])


def _before(shape: Sequence[Any], operands: Sequence[Sequence[Any]], inner: int, outer: int) -> int:
    """-1 when `inner` may stay inside `outer`, 1 when they must swap, 0 when no operand tells."""
    for strides in operands:
        a, b = strides[inner], strides[outer]
        if a is b:
            if not (isinstance(a, int) and a == 0) and shape[inner] > shape[outer]:
                return 1
            continue
        if (isinstance(a, int) and a == 0) or (isinstance(b, int) and b == 0):
            continue
        if a < b:
            return -1
        if a > b:
            return 1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def elementwise_strides(shape: tuple[Any, ...], operands: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Strides of a pointwise result: the operands' own order of dimensions, made dense."""
    first = operands[0]
    row_major = contiguous_strides(shape)
    if all(strides is row_major or strides == row_major for strides in operands):
        return row_major
    if all(is_contiguous(shape, strides) for strides in operands):
        return row_major
    if len(shape) in (4, 5) and all(is_channels_last(shape, strides) for strides in operands):
        return channels_last_strides(shape)
    if all(strides == first for strides in operands[1:]) and is_dense(shape, first):
        return first
    rank = len(shape)
    order = list(range(rank - 1, -1, -1))  # innermost first
    for i in range(1, rank):
        outer = i
        for inner in range(i - 1, -1, -1):
            verdict = _before(shape, operands, order[inner], order[outer])
            if verdict > 0:
                order[inner], order[outer] = order[outer], order[inner]
                outer = inner
            elif verdict < 0:
                break
    return strides_in_order(shape, order[::-1])


def preserved_strides(spec: TensorSpec) -> tuple[Any, ...]:
    """Strides of `empty_like(spec)`: the same when dense, else dense in the same order of dimensions."""
    if is_contiguous(spec.shape, spec.strides) or is_dense(spec.shape, spec.strides):
        return tuple(spec.strides)
    return elementwise_strides(tuple(spec.shape), (tuple(spec.strides),))


def view_strides(shape: Sequence[Any], strides: Sequence[Any], target: Sequence[Any]) -> tuple[Any, ...] | None:
    """Strides of `target` over the same memory, or None when only a copy can have that shape.

    Groups the source's dimensions into runs that lie contiguously in memory, and splits each run
    into the target's dimensions.
    """
    if any(isinstance(size, int) and size == 0 for size in (*shape, *target)):
        return contiguous_strides(target)
    if not shape:
        return (1,) * len(target)
    result: list[Any] = [1] * len(target)
    view_dim = len(target) - 1
    run_stride: Any = strides[-1]
    run_size: Any = 1
    view_size: Any = 1
    for dim in range(len(shape) - 1, -1, -1):
        run_size = run_size * shape[dim]
        ends = dim == 0 or (
            not (isinstance(shape[dim - 1], int) and shape[dim - 1] == 1) and strides[dim - 1] != run_size * run_stride
        )
        if not ends:
            continue
        while view_dim >= 0 and ((isinstance(target[view_dim], int) and target[view_dim] == 1) or view_size < run_size):
            result[view_dim] = view_size * run_stride
            view_size = view_size * target[view_dim]
            view_dim -= 1
        if view_size is not run_size and view_size != run_size:
            return None
        if dim > 0:
            run_stride = strides[dim - 1]
            run_size = 1
            view_size = 1
    return tuple(result) if view_dim == -1 else None


def broadcast_shapes(*shapes: Sequence[Any]) -> tuple[Any, ...]:
    """The shape that all of `shapes` expand to. Raises ValueError when there is none."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Any] = [1] * rank
    for shape in shapes:
        lead = rank - len(shape)
        for i, size in enumerate(shape):
            known = result[lead + i]
            if known is size or (isinstance(size, int) and size == 1):
                continue
            if isinstance(known, int) and known == 1:
                result[lead + i] = size
            elif known != size:
                raise ValueError(f"shapes {[tuple(s) for s in shapes]} do not broadcast: {known} against {size}")
    return tuple(result)


def numel(shape: Sequence[Any]) -> Any:
    product: Any = 1
    for size in shape:
        product = product * size
    return product


def suggested_strides(shape: Sequence[Any], like: TensorSpec) -> tuple[Any, ...]:
    """Strides for a new (N, C, *spatial) tensor in the memory format that `like` suggests."""
    if len(shape) in (4, 5) and len(like.shape) == len(shape) and is_channels_last(like.shape, like.strides):
        if not is_contiguous(like.shape, like.strides):
            return channels_last_strides(shape)
        # A tensor that is both (one channel or 1x1 images) is channels-last to eager when its strides say so.
        if tuple(like.strides) == channels_last_strides(like.shape):
            return channels_last_strides(shape)
    return contiguous_strides(shape)


def is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)
