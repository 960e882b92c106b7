"""Shapes and strides of results: broadcasting, memory formats, TensorIterator's rule for outputs.

Everything works on ints and SymInts. With ints alone the rules are memoised: a graph repeats few layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from typing import TypeVar, cast

import torch

from primtorch.arguments import Sizes, TensorLike
from primtorch.spec import Size
from primtorch.symbolic import depends_on_data
from primtorch.symbolic.sym_node import SymNode, node_of

F = TypeVar("F", bound=Callable[..., object])


def _memoised(fn: F) -> F:
    """Memoise calls on nested tuples of sizes: of ints globally, with symbols in their environment."""
    cached = lru_cache(maxsize=8192)(fn)

    def call(*args: object) -> object:
        try:
            return cached(*args)
        except TypeError:  # SymInts do not hash; their expressions do
            pass
        node = _first_node(args)
        if node is None:
            return fn(*args)
        memo, key = node.env.layouts, (fn, _expressions(args))
        if key not in memo:
            memo[key] = fn(*args)
        return memo[key]

    return cast(F, call)


def _first_node(sizes: tuple[object, ...]) -> SymNode | None:
    for item in sizes:
        if type(item) is torch.SymInt:
            return node_of(item)
        if isinstance(item, tuple):
            found = _first_node(item)
            if found is not None:
                return found
    return None


def _expressions(sizes: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(
        [
            i if type(i) is int else i.node.expr if type(i) is torch.SymInt else _expressions(i)  # type: ignore[arg-type]
            for i in sizes
        ]
    )


def _weight(size: Size) -> int:
    """What a size counts as where layouts are compared and it depends on data: large, no 0 and no 1."""
    if isinstance(size, int):
        return size
    node = node_of(size)
    expr = node.env.simplify(node._int())
    hints = ((name, node.env.symbols[name].hint) for name in expr.symbols())
    return expr.evaluate({name: 1_000_003 + sum(map(ord, name)) if hint is None else hint for name, hint in hints})


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are equal; asks a symbolic size only where the two are not one object."""
    return len(a) == len(b) and all(x is y or x == y for x, y in zip(a, b, strict=True))


def written_alike(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are of equal numbers, or of symbols that are written alike; decided without a guard."""
    return len(a) == len(b) and all(
        x is y or (x == y if type(x) is int and type(y) is int else str(x) == str(y)) for x, y in zip(a, b, strict=True)
    )


def alike(a: Size, b: Size) -> bool:
    """Equality for layouts. The strides of a dimension of one element say nothing, and those of no elements neither,
    so that a size that depends on data may be taken for a larger one without a question to the data."""
    if depends_on_data(a) or depends_on_data(b):
        return _weight(a) == _weight(b) or _is_known(a == b)
    return bool(a == b)


def _less(a: Size, b: Size) -> bool:
    """Order for layouts, as `alike`."""
    if depends_on_data(a) or depends_on_data(b):
        return _weight(a) < _weight(b) or _is_known(a < b)
    return bool(a < b)


def _is_known(relation: object) -> bool:
    """Whether it holds, by what is known of the sizes, in whatever data."""
    return relation is True or (isinstance(relation, torch.SymBool) and node_of(relation).statically_known_true("", 0))


def _all_equal(a: Sizes, b: Sizes) -> bool:
    """Whether they are equal; no symbol is asked where plain numbers say that they are not."""
    if len(a) != len(b) or any(type(x) is int and type(y) is int and x != y for x, y in zip(a, b, strict=True)):
        return False
    return all(x is y or alike(x, y) for x, y in zip(a, b, strict=True))


def product(sizes: Iterable[Size]) -> Size:
    """The product of the sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def at_least_one(size: Size) -> Size:
    """max(size, 1), kept simple where the size is known to be positive."""
    if type(size) is int:
        return size if size > 1 else 1
    return torch.sym_max(size, 1) if depends_on_data(size) else size


@_memoised
def contiguous_strides(shape: Sizes) -> Sizes:
    """Row-major strides; a size of 0 counts as 1."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * at_least_one(size)
    return tuple(reversed(strides))


def strides_in_order(shape: Sizes, innermost_first: Sequence[int]) -> Sizes:
    """Dense strides with the dims laid out in the given order (a size of 0 counts as 1)."""
    strides: list[Size] = [0] * len(shape)
    step: Size = 1
    for dim in innermost_first:
        strides[dim] = step
        step = step * at_least_one(shape[dim])
    return tuple(strides)


def channels_last_order(ndim: int) -> tuple[int, ...]:
    """Dims of (N, C, *spatial), innermost first: C, then spatial from the last, then N."""
    return (1, *range(ndim - 1, 1, -1), 0)


def channels_last_strides(shape: Sizes) -> Sizes:
    """Strides of a dense channels_last tensor of 4 or 5 dims."""
    return strides_in_order(shape, channels_last_order(len(shape)))


def _dense_in_order(shape: Sizes, strides: Sizes, order: Iterable[int]) -> bool:
    step: Size = 1
    for dim in order:
        size = shape[dim]
        if not alike(size, 1):
            if not alike(strides[dim], step):
                return False
            step = step * size
    return True


def has_no_elements(shape: Sizes) -> bool:
    """Whether a size is zero."""
    return any(alike(size, 0) for size in shape)


@_memoised
def is_contiguous(shape: Sizes, strides: Sizes) -> bool:
    """Whether strides, in elements, are those of the shape in row-major order; dims of size 1 may have any."""
    return _dense_in_order(shape, strides, range(len(shape) - 1, -1, -1)) or has_no_elements(shape)


@_memoised
def is_channels_last(shape: Sizes, strides: Sizes) -> bool:
    """Dense in channels_last order (4 or 5 dims); `Tensor.is_contiguous(memory_format=channels_last)`."""
    return len(shape) in (4, 5) and _dense_in_order(shape, strides, channels_last_order(len(shape)))


@_memoised
def is_dense(shape: Sizes, strides: Sizes) -> bool:
    """Whether the elements fill a block of memory without gaps and without overlap."""
    if is_contiguous(shape, strides):
        return True
    order = sorted((d for d in range(len(shape)) if not alike(shape[d], 1)), key=lambda d: _Ordered(strides[d]))
    return _dense_in_order(shape, strides, order)


class _Ordered:
    """A sort key that also compares SymInts."""

    __slots__ = ("value",)

    def __init__(self, value: Size) -> None:
        self.value = value

    def __lt__(self, other: _Ordered) -> bool:
        return _less(self.value, other.value)


@_memoised
def suggests_channels_last(shape: Sizes, strides: Sizes) -> bool:
    """ATen's `is_strides_like_channels_last` for 4 or 5 dims: the order that convolutions and the like will keep."""
    if len(shape) not in (4, 5) or alike(strides[1], 0):
        return False
    minimum: Size = 0
    for dim in channels_last_order(len(shape)):
        size, stride = shape[dim], strides[dim]
        if alike(size, 0) or _less(stride, minimum):
            return False
        # (N, 1, H, W) is ambiguous; contiguous wins.
        if dim == 0 and alike(minimum, strides[1]):
            return False
        minimum = stride
        if _less(1, size):
            minimum = minimum * size
    return True


def suggested_strides(source: TensorLike, shape: Sizes) -> Sizes:
    """Strides for `shape` in the memory format that `source` suggests."""
    if len(shape) in (4, 5) and len(shape) == source.dim() and suggests_channels_last(source.shape, source.stride()):
        return channels_last_strides(shape)
    return contiguous_strides(shape)


def format_strides(shape: Sizes, memory_format: torch.memory_format) -> Sizes:
    """Strides for contiguous_format, channels_last or channels_last_3d.

    Raises:
        RuntimeError: the format does not fit the number of dims.
    """
    if memory_format is torch.channels_last or memory_format is torch.channels_last_3d:
        rank = 4 if memory_format is torch.channels_last else 5
        if len(shape) != rank:
            raise RuntimeError(f"required rank {rank} tensor to use {str(memory_format).removeprefix('torch.')} format")
        return channels_last_strides(shape)
    return contiguous_strides(shape)


def certainly(fact: bool | torch.SymBool) -> bool:
    """Whether something is so of sizes. What only the data tells is not certain: what follows is right for both."""
    if isinstance(fact, torch.SymBool) and fact.node.hint is None:
        return bool(fact.node.statically_known_true(__file__, 0))
    return bool(fact)


def certainly_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are one, so far as is certain."""
    return certainly(a == b)


def broadcast(left: Sizes, right: Sizes) -> Sizes:
    """The common shape, right-aligned.

    Raises:
        RuntimeError: two sizes differ and neither is 1.
    """
    return left if left is right else _broadcast(left, right)


@_memoised
def _broadcast(left: Sizes, right: Sizes) -> Sizes:
    """The common shape, right-aligned.

    Raises:
        RuntimeError: two sizes differ and neither is 1.
    """
    short, long = (left, right) if len(left) < len(right) else (right, left)
    lead = len(long) - len(short)
    out = list(long[:lead])
    for dim in range(len(short)):
        x, y = short[dim], long[lead + dim]
        if type(y) is int and y == 1:  # asked first: a size that depends on data answers no question
            out.append(x)
        elif (type(x) is int and x == 1) or x is y or x in (y, 1):
            out.append(y)
        elif y == 1:
            out.append(x)
        else:
            a, b = (left[dim - len(short)], right[dim - len(short)])
            raise RuntimeError(
                f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension "
                f"{lead + dim}"
            )
    return tuple(out)


def broadcast_shapes(*shapes: Sequence[Size]) -> Sizes:
    """The common shape of any number of shapes.

    Raises:
        RuntimeError: there is none.
    """
    return reduce(broadcast, map(tuple, shapes), ())


def elementwise_strides(shape: Sizes, operands: Iterable[Sizes]) -> Sizes:
    """`iterator_strides` for operands that all have the result's shape."""
    return iterator_strides(shape, tuple([(shape, strides) for strides in operands]))


@_memoised
def iterator_strides(shape: Sizes, operands: tuple[tuple[Sizes, Sizes], ...]) -> Sizes:
    """Strides that TensorIterator gives to a new output of broadcast `shape`.

    Args:
        operands: (shape, strides) of each input, in order.
    """
    if not shape:
        return ()
    if all(_all_equal(s, shape) for s, _ in operands):
        if all(is_contiguous(s, t) for s, t in operands):
            return contiguous_strides(shape)
        if all(is_channels_last(s, t) for s, t in operands):
            return channels_last_strides(shape)
        first = operands[0][1]
        if all(_all_equal(t, first) for _, t in operands) and is_dense(shape, first):
            return first
    return _permuted_strides(shape, operands)


def _permuted_strides(shape: Sizes, operands: tuple[tuple[Sizes, Sizes], ...]) -> Sizes:
    """Dims sorted by the inputs' strides, earlier inputs first; ties keep row-major order."""
    ndim = len(shape)
    columns = [_broadcast_strides(shape, s, t) for s, t in operands]
    order = list(range(ndim - 1, -1, -1))

    def compare(a: int, b: int) -> int:
        for column in columns:
            x, y = column[a], column[b]
            if alike(x, 0) or alike(y, 0):
                continue
            if _less(x, y):
                return -1
            if _less(y, x) or _less(shape[b], shape[a]):
                return 1
        return 0

    for i in range(1, ndim):
        current = i
        for j in range(i - 1, -1, -1):
            relation = compare(order[j], order[current])
            if relation > 0:
                order[j], order[current] = order[current], order[j]
                current = j
            elif relation < 0:
                break
    if order == list(range(ndim - 1, -1, -1)):
        return contiguous_strides(shape)
    strides: list[Size] = [0] * ndim
    step: Size = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def _broadcast_strides(shape: Sizes, own: Sizes, strides: Sizes) -> Sizes:
    lead = len(shape) - len(own)
    out: list[Size] = [0] * lead
    for dim in range(len(own)):
        out.append(0 if alike(own[dim], 1) and not alike(shape[lead + dim], 1) else strides[dim])
    return tuple(out)


def dense_like(shape: Sizes, strides: Sizes) -> Sizes:
    """Strides of `empty_like(..., memory_format=preserve_format)`: the input's if dense, else its order of dims."""
    if is_dense(shape, strides):
        return strides
    return iterator_like(shape, strides)


def iterator_like(shape: Sizes, strides: Sizes) -> Sizes:
    """Dense strides that keep the order of dims of `strides` (ATen's infer_dense_strides)."""
    if not shape:
        return ()
    return _permuted_strides(shape, ((shape, strides),))


def memory_order(tensor: TensorLike) -> tuple[int, ...] | None:
    """The dims from the outermost in memory to the innermost, as ATen walks through them; None: they are in order."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    dense = iterator_like(shape, strides)
    if is_contiguous(shape, dense):
        return None
    return tuple(sorted(range(len(shape)), key=lambda dim: _Ordered(dense[dim]), reverse=True))


def view_strides(shape: Sizes, strides: Sizes, target: Sizes) -> Sizes | None:
    """Strides with which the same memory has shape `target`, or None.

    Old dims are grouped into runs that are contiguous among themselves; each run must be covered by whole new dims.
    """
    if any(not depends_on_data(size) and size == 0 for size in (*shape, *target)):
        return strides if tuple(shape) == tuple(target) else contiguous_strides(tuple(target))
    if not shape:
        return (1,) * len(target)
    out: list[Size] = [0] * len(target)
    new_dim = len(target) - 1
    base = strides[-1]
    run: Size = 1
    covered: Size = 1
    for old_dim in range(len(shape) - 1, -1, -1):
        run = run * shape[old_dim]
        ends = old_dim == 0 or (not _is_one(shape[old_dim - 1]) and not alike(strides[old_dim - 1], run * base))
        if not ends:
            continue
        while new_dim >= 0 and (_is_one(target[new_dim]) or _less(covered, run)):
            out[new_dim] = covered * base
            covered = covered * target[new_dim]
            new_dim -= 1
        if covered is not run and not alike(covered, run):
            return None
        if old_dim > 0:
            base = strides[old_dim - 1]
            run = covered = 1
    return tuple(out) if new_dim == -1 else None


def _is_one(size: Size) -> bool:
    """Whether the size is 1; one that depends on data is not."""
    return size == 1 if type(size) is int else not depends_on_data(size) and bool(size == 1)


def wrap_dim(dim: int, ndim: int) -> int:
    """A dim in [0, ndim); a 0-d tensor counts as 1-d.

    Raises:
        IndexError: as eager.
    """
    span = ndim or 1
    if not -span <= dim < span:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-span}, {span - 1}], but got {dim})")
    return dim % span


def reduced_dims(dims: Sequence[int] | int | None, ndim: int, *, empty_is_all: bool = True) -> tuple[int, ...]:
    """The dims that a reduction removes: None, and () where eager says so, mean all of them."""
    if dims is None or (empty_is_all and not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    wrapped = wrap_dims((dims,) if isinstance(dims, int) else dims, ndim)
    return wrapped if ndim else ()


def wrap_dims(dims: Iterable[int], ndim: int) -> tuple[int, ...]:
    """Wrapped dims, none twice.

    Raises:
        IndexError: out of range. RuntimeError: a dim appears twice.
    """
    wrapped = tuple(wrap_dim(d, ndim) for d in dims)
    if len(set(wrapped)) != len(wrapped):
        twice = next(d for d in wrapped if wrapped.count(d) > 1)
        raise RuntimeError(f"dim {twice} appears multiple times in the list of dims")
    return wrapped
