"""Views, joins, and what writes through a view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value, same_size
from primtorch.decompose.table import RuleTable
from primtorch.layout import product, reduced_dims, wrap_dim
from primtorch.promotion import result_type

aten = torch.ops.aten
RULES = RuleTable()
_LAST = 2**62  # an end of at least this means "to the end"


def resolved_shape(shape: Sequence[Any], count: Any) -> tuple[Any, ...]:
    """A target shape with its -1 worked out from the number of elements."""
    for place, size in enumerate(shape):
        if isinstance(size, int) and size == -1:
            rest = product([s for i, s in enumerate(shape) if i != place])
            if isinstance(rest, int) and rest == 0:
                raise RuntimeError(
                    f"cannot reshape tensor of 0 elements into shape {list(shape)} because the "
                    "unspecified dimension size -1 can be any value and is ambiguous"
                )
            return (*shape[:place], count // rest, *shape[place + 1 :])
    return tuple(shape)


@RULES(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    "aten::view_copy.default",
    "aten::_reshape_copy.default",
    "aten::_reshape_alias_copy.default",
)
def _view(b: Builder, x: Value, size: Sequence[Any], *strides: Any) -> Value:
    return x.reshape(resolved_shape(size, x.numel()))


@RULES(aten.view.dtype, "aten::view_copy.dtype")
def _view_dtype(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    if x.dtype is dtype:
        return x
    if x.dtype.itemsize == dtype.itemsize:
        return b.emit(prims.bitcast, x, dtype)  # type: ignore[no-any-return]
    # Elements are joined or split: a call of itself, on rows that lie in memory one after the other.
    row_major = b.contiguous_spec(x.shape, x.dtype, x.spec.device).strides
    dense = x if x.spec.strides == row_major else b.emit(prims.copy_strided, x, row_major)
    shape = (*x.shape[:-1], x.shape[-1] * x.dtype.itemsize // dtype.itemsize)
    spec = b.contiguous_spec(shape, dtype, x.spec.device)
    return b.record(aten.view.dtype, (dense, dtype), {}, spec, "view_dtype")  # type: ignore[no-any-return]


@RULES(aten.expand.default, "aten::expand_copy.default")
def _expand(b: Builder, x: Value, size: Sequence[Any], *, implicit: bool = False) -> Value:
    lead = len(size) - x.rank
    shape = tuple(x.shape[i - lead] if isinstance(s, int) and s == -1 else s for i, s in enumerate(size))
    return x.expand(shape)


@RULES(aten.permute.default, "aten::permute_copy.default")
def _permute(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    return x.permute([x.dim(d) for d in dims] if x.rank else [])


@RULES(aten.transpose.int, "aten::transpose_copy.int")
def _transpose(b: Builder, x: Value, dim0: int, dim1: int) -> Value:
    return x.transpose(x.dim(dim0), x.dim(dim1)) if x.rank else x


@RULES(aten.t.default, "aten::t_copy.default")
def _t(b: Builder, x: Value) -> Value:
    return x.transpose(0, 1) if x.rank == 2 else x


@RULES(aten.unsqueeze.default, "aten::unsqueeze_copy.default")
def _unsqueeze(b: Builder, x: Value, dim: int) -> Value:
    return x.unsqueeze(wrap_dim(dim, x.rank + 1))


@RULES(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    "aten::squeeze_copy.default",
    "aten::squeeze_copy.dim",
    "aten::squeeze_copy.dims",
)
def _squeeze(b: Builder, x: Value, dims: Any = None) -> Value:
    wanted = range(x.rank) if dims is None else reduced_dims(dims, x.rank, empty_is_all=False)
    return x.squeeze(*(d for d in wanted if same_size(x.shape[d], 1)))


def _bound(place: Any, size: Any, default: Any) -> Any:
    """A slice's end as Python has it: negative counts from the back, then clamped to [0, size]."""
    if place is None:
        return default
    if isinstance(place, int) and isinstance(size, int):
        return min(max(place + size if place < 0 else place, 0), size)
    if isinstance(place, int) and place >= _LAST:
        return size
    if place is size:
        return size
    if place < 0:
        place = place + size
        return torch.sym_max(place, 0) if place < 0 else place
    return size if place >= size else place


@RULES(aten.slice.Tensor, "aten::slice_copy.Tensor")
def _slice(b: Builder, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Value:
    dim = x.dim(dim)
    size = x.shape[dim]
    start = _bound(start, size, 0)
    end = _bound(end, size, size)
    end = max(end, start)
    return x.slice(dim, start, end, step)


def _position(index: Any, size: Any, dim: int) -> Any:
    if isinstance(size, int) and isinstance(index, int) and not -size <= index < size:
        raise IndexError(f"select(): index {index} out of range for tensor of size {size} at dimension {dim}")
    return index + size if index < 0 else index


@RULES(aten.select.int, "aten::select_copy.int")
def _select(b: Builder, x: Value, dim: int, index: Any) -> Value:
    dim = x.dim(dim)
    return x.select(dim, _position(index, x.shape[dim], dim))


@RULES(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default, "aten::split_with_sizes_copy.default")
def _split_with_sizes(b: Builder, x: Value, sizes: Sequence[Any], dim: int = 0) -> tuple[Value, ...]:
    dim = x.dim(dim)
    parts = []
    start: Any = 0
    for size in sizes:
        parts.append(x.slice(dim, start, start + size))
        start = start + size
    return tuple(parts)


@RULES(aten.split.Tensor, aten.unsafe_split.Tensor, "aten::split_copy.Tensor")
def _split(b: Builder, x: Value, size: Any, dim: int = 0) -> tuple[Value, ...]:
    dim = x.dim(dim)
    total = x.shape[dim]
    if same_size(size, 0):
        return (x,)
    parts = []
    start: Any = 0
    while start < total:
        stop = total if start + size >= total else start + size
        parts.append(x.slice(dim, start, stop))
        start = start + size
    return tuple(parts) if parts else (x,)


@RULES(aten.unbind.int, "aten::unbind_copy.int")
def _unbind(b: Builder, x: Value, dim: int = 0) -> tuple[Value, ...]:
    dim = x.dim(dim)
    return tuple(x.select(dim, i) for i in range(int(x.shape[dim])))


@RULES(
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift.default,
    "aten::alias_copy.default",
    "aten::detach_copy.default",
    "aten::lift_fresh_copy.default",
    "aten::view_as.default",
    "aten::_fw_primal.default",
)
def _same(b: Builder, x: Value, *rest: Any) -> Value:
    return x


@RULES(aten.diagonal.default, "aten::diagonal_copy.default")
def _diagonal(b: Builder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dim1, dim2 = x.dim(dim1), x.dim(dim2)
    if dim1 == dim2:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    return b.emit(prims.diagonal, x, offset, dim1, dim2)  # type: ignore[no-any-return]


@RULES(aten.unfold.default, "aten::unfold_copy.default")
def _unfold(b: Builder, x: Value, dim: int, size: Any, step: Any) -> Value:
    return b.emit(prims.unfold, x, x.dim(dim), size, step)  # type: ignore[no-any-return]


@RULES(aten.unfold_backward.default)
def _unfold_backward(b: Builder, grad: Value, input_sizes: Sequence[Any], dim: int, size: Any, step: Any) -> Value:
    rank = len(input_sizes)
    if rank == 0:
        return grad.reshape(())
    dim = wrap_dim(dim, rank)
    index = b.emit(prims.unfold, b.iota(input_sizes[dim], grad.device), 0, size, step)
    moved = grad.permute([*range(dim), *range(dim + 1, rank), dim, rank])
    zeros = b.full([*(s for d, s in enumerate(input_sizes) if d != dim), input_sizes[dim]], 0, grad.dtype, grad.device)
    out = b.emit(prims.index_put, zeros, (*(None,) * (rank - 1), index), moved, True, False)
    return out.permute([*range(dim), rank - 1, *range(dim, rank - 1)])  # type: ignore[no-any-return]


@RULES(aten.as_strided.default, "aten::as_strided_copy.default")
def _as_strided(b: Builder, x: Value, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> Value:
    return b.emit(  # type: ignore[no-any-return]
        prims.as_strided,
        x,
        tuple(size),
        tuple(stride),  # type: ignore[no-any-return]
        x.spec.offset if offset is None else offset,
    )


@RULES(aten.flip.default)
def _flip(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    dims = reduced_dims(dims, x.rank, empty_is_all=False)
    return b.emit(prims.flip, x, dims) if dims else x


@RULES(aten.roll.default)
def _roll(b: Builder, x: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = (shifts,) if isinstance(shifts, (int, torch.SymInt)) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if isinstance(x.numel(), int) and x.numel() == 0:
        return x
    if not dims:
        flat = b.emit(prims.roll, x.reshape((x.numel(),)), shifts, (0,))
        return flat.reshape(x.shape)  # type: ignore[no-any-return]
    for shift, dim in zip(shifts, dims, strict=True):
        x = b.emit(prims.roll, x, (shift,), (x.dim(dim),))
    return x


@RULES(aten.rot90.default)
def _rot90(b: Builder, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    first, second = (x.dim(d) for d in dims)
    k %= 4
    if k == 1:
        return _flip(b, x, (second,)).transpose(first, second)  # type: ignore[no-any-return]
    if k == 2:
        return _flip(b, x, (first, second))  # type: ignore[no-any-return]
    return _flip(b, x, (first,)).transpose(first, second) if k == 3 else x  # type: ignore[no-any-return]


@RULES(aten.repeat.default)
def _repeat(b: Builder, x: Value, repeats: Sequence[Any]) -> Value:
    lead = len(repeats) - x.rank
    shape = (*(1,) * lead, *x.shape)
    x = x.reshape(shape)
    if all(isinstance(r, int) and r == 1 for r in repeats):
        return x
    spread = x.reshape([n for s in shape for n in (1, s)]).expand(
        [n for r, s in zip(repeats, shape, strict=True) for n in (r, s)]
    )
    return spread.reshape([r * s for r, s in zip(repeats, shape, strict=True)])


# --- joins ---------------------------------------------------------------------------------------
@RULES(aten.cat.default, aten.concat.default)
def _cat(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dtype = result_type(tensors)
    # Eager skips 1-d empty tensors, whatever the others' rank.
    kept = [t for t in tensors if not (t.rank == 1 and isinstance(t.shape[0], int) and t.shape[0] == 0)]
    if not kept:
        return tensors[0].to(dtype)
    return b.cat([t.to(dtype) for t in kept], kept[0].dim(dim))


@RULES(aten.stack.default)
def _stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dtype = result_type(tensors)
    dim = wrap_dim(dim, tensors[0].rank + 1)
    return b.cat([t.to(dtype).unsqueeze(dim) for t in tensors], dim)


@RULES(aten.slice_backward.default)
def _slice_backward(b: Builder, grad: Value, sizes: Sequence[Any], dim: int, start: Any, end: Any, step: Any) -> Value:
    dim = wrap_dim(dim, len(sizes))
    size = sizes[dim]
    start = _bound(start, size, 0)
    end = _bound(end, size, size)
    if isinstance(step, int) and step == 1:
        low = tuple(start if d == dim else 0 for d in range(len(sizes)))
        high = tuple(size - start - grad.shape[dim] if d == dim else 0 for d in range(len(sizes)))
        return b.emit(prims.pad, grad, low, high, b.number(0, grad))  # type: ignore[no-any-return]
    zeros = b.full(sizes, 0, grad.dtype, grad.device)
    stop = start if end < start else end
    return b.emit(prims.slice_scatter, zeros, grad, dim, start, stop, step)  # type: ignore[no-any-return]


@RULES(aten.select_backward.default)
def _select_backward(b: Builder, grad: Value, sizes: Sequence[Any], dim: int, index: Any) -> Value:
    dim = wrap_dim(dim, len(sizes))
    place = _position(index, sizes[dim], dim)
    low = tuple(place if d == dim else 0 for d in range(len(sizes)))
    high = tuple(sizes[dim] - 1 - place if d == dim else 0 for d in range(len(sizes)))
    return b.emit(prims.pad, grad.unsqueeze(dim), low, high, b.number(0, grad))  # type: ignore[no-any-return]


@RULES(aten.diagonal_backward.default)
def _diagonal_backward(b: Builder, grad: Value, sizes: Sequence[Any], offset: int, dim1: int, dim2: int) -> Value:
    zeros = b.full(sizes, 0, grad.dtype, grad.device)
    return _diagonal_scatter(b, zeros, grad, offset, dim1, dim2)  # type: ignore[no-any-return]


@RULES(aten.slice_scatter.default)
def _slice_scatter(
    b: Builder, x: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Value:
    dim = x.dim(dim)
    size = x.shape[dim]
    start = _bound(start, size, 0)
    end = _bound(end, size, size)
    end = max(end, start)
    length = (end - start + step - 1) // step
    src = src.to(x.dtype).expand([length if d == dim else s for d, s in enumerate(x.shape)])
    if isinstance(step, int) and step == 1 and isinstance(start, int) and start == 0 and same_size(end, size):
        return src
    return b.emit(prims.slice_scatter, x, src, dim, start, end, step)  # type: ignore[no-any-return]


@RULES(aten.select_scatter.default)
def _select_scatter(b: Builder, x: Value, src: Value, dim: int, index: Any) -> Value:
    dim = x.dim(dim)
    place = _position(index, x.shape[dim], dim)
    src = src.to(x.dtype).unsqueeze(dim)
    return b.emit(prims.slice_scatter, x, src, dim, place, place + 1, 1)  # type: ignore[no-any-return]


@RULES(aten.diagonal_scatter.default)
def _diagonal_scatter(b: Builder, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dim1, dim2 = x.dim(dim1), x.dim(dim2)
    length = src.shape[-1]
    rows = b.iota(length, x.device, start=max(-offset, 0))
    columns = b.iota(length, x.device, start=max(offset, 0))
    order = [d for d in range(x.rank) if d not in (dim1, dim2)] + [dim1, dim2]
    moved = x.permute(order)
    indices = (*(None,) * (x.rank - 2), rows, columns)
    out = b.emit(prims.index_put, moved, indices, src.to(x.dtype), False, False)
    return out.permute([order.index(d) for d in range(x.rank)])  # type: ignore[no-any-return]


@RULES(aten.as_strided_scatter.default)
def _as_strided_scatter(
    b: Builder, x: Value, src: Value, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
) -> Value:
    at = x.spec.offset if offset is None else offset
    return b.emit(prims.as_strided_scatter, x, src.to(x.dtype), tuple(size), tuple(stride), at)  # type: ignore[no-any-return]


@RULES(aten.diag_embed.default)
def _diag_embed(b: Builder, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    rank = x.rank + 1
    dim1, dim2 = wrap_dim(dim1, rank), wrap_dim(dim2, rank)
    length = x.shape[-1] + abs(offset)
    zeros = b.full((*x.shape[:-1], length, length), 0, x.dtype, x.device)
    filled = _diagonal_scatter(b, zeros, x, offset, -2, -1)
    order = list(range(rank - 2))
    for dim, place in sorted(((dim1, rank - 2), (dim2, rank - 1))):
        order.insert(dim, place)
    return filled.permute(order)  # type: ignore[no-any-return]


@RULES(aten.pixel_shuffle.default)
def _pixel_shuffle(b: Builder, x: Value, factor: int) -> Value:
    *lead, c, h, w = x.shape
    n, f = len(lead), factor
    split = x.reshape((*lead, c // (f * f), f, f, h, w))
    moved = split.permute([*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return moved.reshape((*lead, c // (f * f), h * f, w * f))


@RULES(aten.pixel_unshuffle.default)
def _pixel_unshuffle(b: Builder, x: Value, factor: int) -> Value:
    *lead, c, h, w = x.shape
    n, f = len(lead), factor
    split = x.reshape((*lead, c, h // f, f, w // f, f))
    moved = split.permute([*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return moved.reshape((*lead, c * f * f, h // f, w // f))


@RULES(aten.channel_shuffle.default, "aten::native_channel_shuffle.default")
def _channel_shuffle(b: Builder, x: Value, groups: int) -> Value:
    n, c, *rest = x.shape
    return x.reshape((n, groups, c // groups, *rest)).transpose(1, 2).reshape(x.shape)


@RULES(aten.trace.default)
def _trace(b: Builder, x: Value) -> Value:
    diagonal = b.emit(prims.diagonal, x, 0, 0, 1)
    wide = diagonal if x.dtype.is_floating_point or x.dtype.is_complex else diagonal.to(torch.int64)
    return wide.sum((0,))  # type: ignore[no-any-return]
