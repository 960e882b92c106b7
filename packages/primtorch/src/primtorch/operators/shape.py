"""Elements rearranged into new memory: cat, pad, flip, scatter of slices."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from primtorch import prims
from primtorch.arguments import Number, PerDim, TensorLike
from primtorch.builder import Builder, Value, same_size
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Formula, Refusal, Rule, Trait
from primtorch.layout import (
    channels_last_strides,
    contiguous_strides,
    dense_like,
    product,
    reduced_dims,
    suggests_channels_last,
    view_strides,
    wrap_dim,
    wrap_dims,
)
from primtorch.operators.build import common_device, contiguous, strided
from primtorch.operators.refusals import is_empty, refuse, refuse_batch, refuse_overflow
from primtorch.operators.view import diagonal, refuse_strides, select_position, slice_bound, slice_bounds
from primtorch.operators.window import laid_out_on_cpu
from primtorch.operators.written_parts import with_part
from primtorch.promotion import result_type
from primtorch.samples import call, reals
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import expected

OP = Family("shape")
OP.trait(Trait.ANYWHERE, "as_strided_scatter diagonal_scatter select_scatter slice_scatter")
OP.trait(Trait.ONE_DEVICE, "stack")
OP.trait(Trait.TO_FIRST, "as_strided_scatter diagonal_scatter select_scatter slice_scatter")
OP.trait(Trait.CONVERTS_OUT, "_chunk_cat cat stack")
OP.trait(Trait.TYPE_ERROR_OUT, "_chunk_cat cat stack")
OP.trait(Trait.SHARES_NOTHING, "cat")


@OP.formula("select_backward", "diagonal_backward", "unfold_backward")
def _select_backward(grad: TensorLike, input_sizes: Sequence[Size], *args: object) -> TensorSpec:
    return contiguous(grad, input_sizes)


@OP.formula("slice_backward")
def _slice_backward(
    grad: TensorLike, input_sizes: Sequence[Size], dim: int, start: Size | None, end: Size | None, step: int
) -> TensorSpec:
    part, at = list(input_sizes), wrap_dim(dim, len(input_sizes))
    part[at] = slice_bounds(part[at], start, end, step)[1]
    _check_part(grad, part)  # where only the data tells how much is left, the gradient tells it
    return contiguous(grad, input_sizes)


@OP.rule("unfold_backward")
def _lower_unfold_backward(
    b: Builder, grad: Value, input_sizes: Sequence[Size], dim: int, size: Size, step: Size
) -> Value:
    rank = len(input_sizes)
    if rank == 0:
        return grad.reshape(())
    dim = wrap_dim(dim, rank)
    index = b.emit(prims.unfold, b.iota(input_sizes[dim], grad.device), 0, size, step)
    moved = grad.permute([*range(dim), *range(dim + 1, rank), dim, rank])
    zeros = b.full([*(s for d, s in enumerate(input_sizes) if d != dim), input_sizes[dim]], 0, grad.dtype, grad.device)
    out = b.emit(prims.index_put, zeros, (*(None,) * (rank - 1), index), moved, True, False)
    return out.permute([*range(dim), rank - 1, *range(dim, rank - 1)])


@OP.formula("is_same_size")
def _is_same_size(x: TensorLike, other: TensorLike) -> bool:
    return x.dim() == other.dim() and all(a == b for a, b in zip(x.shape, other.shape, strict=True))


@OP.formula("_has_same_storage_numel")
def _has_same_storage_numel(x: TensorLike, other: TensorLike) -> bool:
    """Of the memory that the tensors span: what lies around them is not known of every fake."""
    spans = [
        t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        for t in (x, other)
    ]
    return bool(spans[0] == spans[1])


@OP.formula("flip")
def _flip(x: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    shape = tuple(x.shape)
    return strided(x, shape, dense_like(shape, x.stride()))


@OP.refuses("flip")
def _refuse_flip(x: TensorLike, dims: Sequence[int]) -> None:
    wrap_dims(dims, x.dim())


@OP.rule("flip")
def _lower_flip(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    dims = reduced_dims(dims, x.rank, empty_is_all=False)
    return b.emit(prims.flip, x, dims) if dims else x


@OP.formula("roll")
def _roll(x: TensorLike, shifts: PerDim, dims: int | Sequence[int] = ()) -> TensorSpec:
    shape = tuple(x.shape)
    if any(map(is_empty, shape)):
        return strided(x, shape, dense_like(shape, x.stride()))
    # On the CPU the pieces are joined by cat, which keeps channels_last where none of them is empty.
    if dims and Fact.ROLLS_BY_CAT.on(x.device) and suggests_channels_last(shape, x.stride()):
        moves = shifts if isinstance(shifts, list | tuple) else (shifts,)
        along = dims if isinstance(dims, list | tuple) else (dims,)
        if not any(move % shape[dim] == 0 for move, dim in zip(moves, along, strict=True)):
            return strided(x, shape, channels_last_strides(shape))
    return contiguous(x, shape)


@OP.refuses("roll")
def _refuse_roll(x: TensorLike, shifts: PerDim, dims: int | Sequence[int] = ()) -> None:
    moves = shifts if isinstance(shifts, list | tuple) else (shifts,)
    along = dims if isinstance(dims, list | tuple) else (dims,)
    refuse(not moves, "`shifts` required")
    refuse(
        len(moves) != len(along) and not (not along and len(moves) == 1),
        lambda: f"shifts and dimensions must align. shifts: {len(moves)}, dims:{len(along)}",
    )
    for dim in along:
        refuse(x.dim() == 0, lambda: f"Dimension specified as {dim} but tensor has no dimensions", IndexError)
        wrap_dim(dim, x.dim())


@OP.rule("roll")
def _lower_roll(b: Builder, x: Value, shifts: PerDim, dims: int | Sequence[int] = ()) -> Value:
    shifts = (shifts,) if isinstance(shifts, (int, torch.SymInt)) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if isinstance(x.numel(), int) and x.numel() == 0:
        return x
    if not dims:
        flat = b.emit(prims.roll, x.reshape((x.numel(),)), shifts, (0,))
        return flat.reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = b.emit(prims.roll, x, (shift,), (x.dim(dim),))
    return x


@OP.formula("rot90")
def _rot90(x: TensorLike, k: int = 1, dims: Sequence[int] = (0, 1)) -> TensorSpec:
    if k % 4 == 0:
        return contiguous(x, x.shape)
    flipped = _flip(x)
    if k % 4 == 2:
        return flipped
    a, b = wrap_dim(dims[0], x.dim()), wrap_dim(dims[1], x.dim())
    shape, strides = list(flipped.shape), list(flipped.strides)
    shape[a], shape[b] = shape[b], shape[a]
    strides[a], strides[b] = strides[b], strides[a]
    return strided(x, shape, strides)


@OP.refuses("rot90")
def _refuse_rot90(x: TensorLike, k: int = 1, dims: Sequence[int] = (0, 1)) -> None:
    refuse(len(dims) != 2, lambda: f"expected total rotation dims == 2, but got dims = {len(dims)}")
    refuse(x.dim() < 2, lambda: f"expected total dims >= 2, but got total dims = {x.dim()}")
    first, second = (d + x.dim() if d < 0 else d for d in dims)
    refuse(first == second, lambda: f"expected rotation dims to be different, but got {dims[0]} and {dims[1]}")
    for d in dims:
        wrap_dim(d, x.dim())


@OP.rule("rot90")
def _lower_rot90(b: Builder, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    first, second = (x.dim(d) for d in dims)
    k %= 4
    if k == 1:
        return _lower_flip(b, x, (second,)).transpose(first, second)
    if k == 2:
        return _lower_flip(b, x, (first, second))
    return _lower_flip(b, x, (first,)).transpose(first, second) if k == 3 else x


@OP.formula("repeat")
def _repeat(x: TensorLike, repeats: Sequence[Size]) -> TensorSpec:
    lead = len(repeats) - x.dim()
    if lead < 0:
        raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    shape = (1,) * lead + tuple(x.shape)
    return contiguous(x, [s * r for s, r in zip(shape, repeats, strict=True)])


@OP.rule("repeat")
def _lower_repeat(b: Builder, x: Value, repeats: Sequence[Size]) -> Value:
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
@OP.formula("cat", "concat", "concatenate")
def _cat(tensors: Sequence[TensorLike], dim: int = 0) -> TensorSpec:
    if not tensors:
        raise RuntimeError("torch.cat(): expected a non-empty list of Tensors")
    device = common_device(tensors)
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        if t.dtype is not dtype:
            dtype = torch.promote_types(dtype, t.dtype)
    # An empty 1-d tensor is skipped, whatever the others' number of dims.
    full = [t for t in tensors if not (t.dim() == 1 and type(t.shape[0]) is int and t.shape[0] == 0)]
    if not full:
        return TensorSpec((0,), (1,), dtype, device)
    first = full[0]
    if first.dim() == 0:
        raise RuntimeError("zero-dimensional tensor (at position 0) cannot be concatenated")
    at = wrap_dim(dim, first.dim())
    shape = list(first.shape)
    for position, t in enumerate(full[1:], 1):
        if t.dim() != len(shape):
            raise RuntimeError(f"Tensors must have same number of dimensions: got {len(shape)} and {t.dim()}")
        for d, size in enumerate(t.shape):
            if d != at and size != shape[d]:
                raise RuntimeError(
                    f"Sizes of tensors must match except in dimension {at}. Expected {shape[d]} in dimension "
                    f"{d} but got {size} "
                    f"for tensor number {position} in the list"
                )
        shape[at] = shape[at] + t.shape[at]
    out = tuple(shape)
    formats = {suggests_channels_last(tuple(t.shape), t.stride()) for t in tensors}
    strides = channels_last_strides(out) if formats == {True} else contiguous_strides(out)
    return TensorSpec(out, strides, dtype, device)


@OP.refuses("cat")
def _refuse_cat(tensors: Sequence[TensorLike], dim: int = 0) -> None:
    refuse(not tensors, "torch.cat(): expected a non-empty list of Tensors", ValueError)


@OP.rule("cat", "concat")
def _lower_cat(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dtype = result_type(tensors)
    # Eager skips 1-d empty tensors, whatever the others' rank.
    kept = [t for t in tensors if not (t.rank == 1 and isinstance(t.shape[0], int) and t.shape[0] == 0)]
    if not kept:
        return tensors[0].to(dtype)
    return b.cat([t.to(dtype) for t in kept], kept[0].dim(dim))


@OP.formula("stack")
def _stack(tensors: Sequence[TensorLike], dim: int = 0) -> TensorSpec:
    first = tensors[0]
    at = wrap_dim(dim, first.dim() + 1)
    for t in tensors[1:]:
        if tuple(t.shape) != tuple(first.shape):
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(first.shape)} and {list(t.shape)}"
            )
    shape = list(first.shape)
    shape.insert(at, len(tensors))
    dtype = first.dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    if at == first.dim() or not all(suggests_channels_last(tuple(t.shape), t.stride()) for t in tensors):
        return contiguous(first, shape, dtype)
    # They are joined along the dimension, which is then split in two.
    joined = _cat(tensors, at)
    strides = view_strides(tuple(joined.shape), joined.strides, tuple(shape))
    assert strides is not None  # a dim can be split whatever its stride
    return TensorSpec(tuple(shape), strides, dtype, joined.device)


@OP.rule("stack", "_stack")
def _lower_stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dtype = result_type(tensors)
    dim = wrap_dim(dim, tensors[0].rank + 1)
    return b.cat([t.to(dtype).unsqueeze(dim) for t in tensors], dim)


@OP.rule("slice_backward")
def _lower_slice_backward(
    b: Builder, grad: Value, sizes: Sequence[Size], dim: int, start: Size | None, end: Size | None, step: Size
) -> Value:
    dim = wrap_dim(dim, len(sizes))
    size = sizes[dim]
    start = slice_bound(start, size, 0)
    end = slice_bound(end, size, size)
    if isinstance(step, int) and step == 1:
        low = tuple(start if d == dim else 0 for d in range(len(sizes)))
        high = tuple(size - start - grad.shape[dim] if d == dim else 0 for d in range(len(sizes)))
        return b.emit(prims.pad, grad, low, high, b.number(0, grad))
    zeros = b.full(sizes, 0, grad.dtype, grad.device)
    stop = start if end < start else end
    return b.emit(prims.slice_scatter, zeros, grad, dim, start, stop, step)


@OP.rule("select_backward")
def _lower_select_backward(b: Builder, grad: Value, sizes: Sequence[Size], dim: int, index: Size) -> Value:
    dim = wrap_dim(dim, len(sizes))
    place = select_position(index, sizes[dim], dim)
    low = tuple(place if d == dim else 0 for d in range(len(sizes)))
    high = tuple(sizes[dim] - 1 - place if d == dim else 0 for d in range(len(sizes)))
    return b.emit(prims.pad, grad.unsqueeze(dim), low, high, b.number(0, grad))


@OP.formula("slice_scatter")
def _scatter_slice(
    x: TensorLike, src: TensorLike, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1
) -> TensorSpec:
    at, part = wrap_dim(dim, x.dim()), list(x.shape)
    part[at] = slice_bounds(part[at], start, end, step)[1]
    _check_part(src, part)
    return _with_part(x, src)


@OP.formula("select_scatter")
def _scatter_selected(x: TensorLike, src: TensorLike, dim: int, index: Size) -> TensorSpec:
    at, shape = wrap_dim(dim, x.dim()), list(x.shape)
    size = shape[at]
    if not expected(index >= -size) or not expected(index < size):
        raise IndexError(f"select(): index {index} out of range for tensor of size {shape} at dimension {at}")
    _check_part(src, shape[:at] + shape[at + 1 :])
    return _with_part(x, src)


def _check_part(src: TensorLike, part: Sequence[Size]) -> None:
    """Raises RuntimeError where a part of a tensor is given another shape than it has."""
    if len(src.shape) != len(part) or not all(expected(a == b) for a, b in zip(src.shape, part, strict=True)):
        raise RuntimeError(
            "expected src to have a size equal to the slice of self. "
            f"src size = {list(src.shape)}, slice size = {list(part)}"
        )


@OP.refuses("diagonal_scatter")
def _refuse_diagonal(x: TensorLike, src: TensorLike, offset: int = 0, dim1: int = 0, dim2: int = 1) -> None:
    _check_part(src, diagonal(x, offset, dim1, dim2).shape)


@OP.refuses("as_strided_scatter")
def _refuse_places(x: TensorLike, src: TensorLike, size: Sequence[Size], stride: Sequence[Size], *rest: Size) -> None:
    refuse_strides(x, size, stride, *rest)
    _check_part(src, size)
    refuse(
        any(type(step) is int and step == 0 and n != 1 for n, step in zip(size, stride, strict=True)),
        "unsupported operation: more than one element of the written-to tensor refers to a single memory location",
    )


@OP.formula("diagonal_scatter", "as_strided_scatter")
def _with_part(x: TensorLike, src: TensorLike, *args: object, **kwargs: object) -> TensorSpec:
    """In the layout of `x`, gaps included, unless elements of `x` surely share memory."""
    shape, strides = tuple(x.shape), tuple(x.stride())
    expanded = any(
        type(stride) is int and stride == 0 and not (type(size) is int and size == 1)
        for size, stride in zip(shape, strides, strict=True)
    )
    return strided(x, shape, dense_like(shape, strides) if expanded else strides)


@OP.rule("diagonal_scatter")
def _lower_diagonal_scatter(b: Builder, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dim1, dim2 = x.dim(dim1), x.dim(dim2)
    length = src.shape[-1]
    rows = b.iota(length, x.device, start=max(-offset, 0))
    columns = b.iota(length, x.device, start=max(offset, 0))
    order = [d for d in range(x.rank) if d not in (dim1, dim2)] + [dim1, dim2]
    moved = x.permute(order)
    indices = (*(None,) * (x.rank - 2), rows, columns)
    out = b.emit(prims.index_put, moved, indices, src.to(x.dtype), False, False)
    return out.permute([order.index(d) for d in range(x.rank)])


@OP.rule("diagonal_backward")
def _lower_diagonal_backward(
    b: Builder, grad: Value, sizes: Sequence[Size], offset: int, dim1: int, dim2: int
) -> Value:
    zeros = b.full(sizes, 0, grad.dtype, grad.device)
    return _lower_diagonal_scatter(b, zeros, grad, offset, dim1, dim2)


@OP.rule("slice_scatter")
def _lower_slice_scatter(
    b: Builder, x: Value, src: Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Value:
    dim = x.dim(dim)
    size = x.shape[dim]
    start = slice_bound(start, size, 0)
    end = slice_bound(end, size, size)
    end = max(end, start)
    length = (end - start + step - 1) // step
    src = src.to(x.dtype).expand([length if d == dim else s for d, s in enumerate(x.shape)])
    if isinstance(step, int) and step == 1 and isinstance(start, int) and start == 0 and same_size(end, size):
        return src
    if isinstance(step, int) and step == 1:
        return with_part(b, x, src, dim, start, end)
    return b.emit(prims.slice_scatter, x, src, dim, start, end, step)


@OP.rule("select_scatter")
def _lower_select_scatter(b: Builder, x: Value, src: Value, dim: int, index: Size) -> Value:
    dim = x.dim(dim)
    place = select_position(index, x.shape[dim], dim)
    src = src.to(x.dtype).unsqueeze(dim)
    return with_part(b, x, src, dim, place, place + 1)


@OP.rule("as_strided_scatter")
def _lower_as_strided_scatter(
    b: Builder, x: Value, src: Value, size: Sequence[Size], stride: Sequence[Size], offset: Size | None = None
) -> Value:
    at = x.spec.offset if offset is None else offset
    return b.emit(prims.as_strided_scatter, x, src.to(x.dtype), tuple(size), tuple(stride), at)


@OP.formula("diag_embed")
def _diag_embed(x: TensorLike, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TensorSpec:
    rank = x.dim() + 1
    size = x.shape[-1] + abs(offset)
    shape: list[Size] = list(x.shape[:-1])
    for dim in sorted((wrap_dim(dim1, rank), wrap_dim(dim2, rank))):
        shape.insert(dim, size)
    return contiguous(x, shape)


@OP.refuses("diag_embed")
def _refuse_diag_embed(x: TensorLike, offset: int = 0, dim1: int = -2, dim2: int = -1) -> None:
    first, second = wrap_dim(dim1, x.dim() + 1), wrap_dim(dim2, x.dim() + 1)
    refuse(first == second, lambda: f"diagonal dimensions cannot be identical {dim1}, {dim2}")


@OP.rule("diag_embed")
def _lower_diag_embed(b: Builder, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    rank = x.rank + 1
    dim1, dim2 = wrap_dim(dim1, rank), wrap_dim(dim2, rank)
    length = x.shape[-1] + abs(offset)
    zeros = b.full((*x.shape[:-1], length, length), 0, x.dtype, x.device)
    filled = _lower_diagonal_scatter(b, zeros, x, offset, -2, -1)
    order = list(range(rank - 2))
    for dim, place in sorted(((dim1, rank - 2), (dim2, rank - 1))):
        order.insert(dim, place)
    return filled.permute(order)


@OP.formula("pixel_shuffle")
def _pixel_shuffle(x: TensorLike, upscale_factor: int) -> TensorSpec:
    *lead, c, h, w = x.shape
    r = upscale_factor
    return laid_out_on_cpu(x, (*lead, c // (r * r), h * r, w * r))


@OP.refuses("pixel_shuffle")
def _refuse_pixel_shuffle(x: TensorLike, upscale_factor: int) -> None:
    refuse(x.dim() < 3, lambda: f"pixel_shuffle expects input to have at least 3 dimensions, but got {x.dim()}")
    refuse(upscale_factor <= 0, lambda: f"pixel_shuffle expects a positive upscale_factor, but got {upscale_factor}")
    refuse(
        x.shape[-3] % (upscale_factor * upscale_factor) != 0,
        "pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of upscale_factor",
    )


@OP.rule("pixel_shuffle")
def _lower_pixel_shuffle(b: Builder, x: Value, factor: int) -> Value:
    *lead, c, h, w = x.shape
    n, f = len(lead), factor
    split = x.reshape((*lead, c // (f * f), f, f, h, w))
    moved = split.permute([*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return moved.reshape((*lead, c // (f * f), h * f, w * f))


@OP.formula("pixel_unshuffle")
def _pixel_unshuffle(x: TensorLike, downscale_factor: int) -> TensorSpec:
    *lead, c, h, w = x.shape
    r = downscale_factor
    return laid_out_on_cpu(x, (*lead, c * r * r, h // r, w // r))


@OP.refuses("pixel_unshuffle")
def _refuse_pixel_unshuffle(x: TensorLike, downscale_factor: int) -> None:
    refuse(x.dim() < 3, lambda: f"pixel_unshuffle expects input to have at least 3 dimensions, but got {x.dim()}")
    refuse(
        downscale_factor <= 0,
        lambda: f"pixel_unshuffle expects a positive downscale_factor, but got {downscale_factor}",
    )
    refuse(
        x.shape[-1] % downscale_factor != 0 or x.shape[-2] % downscale_factor != 0,
        "pixel_unshuffle expects height and width to be divisible by downscale_factor",
    )


@OP.rule("pixel_unshuffle")
def _lower_pixel_unshuffle(b: Builder, x: Value, factor: int) -> Value:
    *lead, c, h, w = x.shape
    n, f = len(lead), factor
    split = x.reshape((*lead, c, h // f, f, w // f, f))
    moved = split.permute([*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return moved.reshape((*lead, c * f * f, h // f, w // f))


@OP.formula("channel_shuffle")
def _channel_shuffle(x: TensorLike, groups: Size) -> TensorSpec:
    return laid_out_on_cpu(x, tuple(x.shape))


@OP.refuses("channel_shuffle", "native_channel_shuffle")
def _refuse_channel_shuffle(x: TensorLike, groups: Size) -> None:
    refuse(x.dim() < 3, lambda: f"channel_shuffle expects input with > 2 dims, but got input with {list(x.shape)}")
    refuse(groups <= 0, lambda: f"Number of groups to divide channels in must be positive, not {groups}")
    channels = x.shape[1]
    refuse(channels // groups * groups != channels, "Number of channels must be divisible by groups.")


@OP.rule("channel_shuffle", "native_channel_shuffle?")
def _lower_channel_shuffle(b: Builder, x: Value, groups: int) -> Value:
    n, c, *rest = x.shape
    return x.reshape((n, groups, c // groups, *rest)).transpose(1, 2).reshape(x.shape)


@OP.formula("trace")
def _trace(a: TensorLike) -> TensorSpec:
    return contiguous(a, (), a.dtype if a.dtype.is_floating_point or a.dtype.is_complex else torch.int64)


@OP.refuses("trace")
def _refuse_trace(x: TensorLike) -> None:
    refuse(x.dim() != 2, lambda: f"trace: expected a matrix, but got tensor with dim {x.dim()}")


@OP.rule("trace")
def _lower_trace(b: Builder, x: Value) -> Value:
    diagonal = b.emit(prims.diagonal, x, 0, 0, 1)
    wide = diagonal if x.dtype.is_floating_point or x.dtype.is_complex else diagonal.to(torch.int64)
    return wide.sum((0,))


@OP.formula("constant_pad_nd")
def _constant_pad(x: TensorLike, pad: Sequence[Size], value: Number = 0) -> TensorSpec:
    shape = list(x.shape)
    for k in range(len(pad) // 2):
        dim = len(shape) - 1 - k
        shape[dim] = shape[dim] + pad[2 * k] + pad[2 * k + 1]
        if shape[dim] < 0:
            raise RuntimeError(
                f"The input size {x.shape[dim]}, plus negative padding, resulted in a negative output size"
            )
    out = tuple(shape)
    if all(p <= 0 for p in pad):
        # Cropping alone is a copy of a view.
        return strided(x, out, dense_like(out, x.stride()))
    keeps = suggests_channels_last(tuple(x.shape), x.stride())
    return strided(x, out, channels_last_strides(out) if keeps else contiguous_strides(out))


@OP.refuses("constant_pad_nd")
def _refuse_constant_pad(x: TensorLike, pad: Sequence[Size], value: Number = 0) -> None:
    refuse_overflow(value, x.dtype)


@OP.rule("constant_pad_nd")
def _lower_constant_pad(b: Builder, x: Value, pad: Sequence[Size], value: Number = 0) -> Value:
    low: list[Size] = [0] * x.rank
    high: list[Size] = [0] * x.rank
    for i in range(len(pad) // 2):
        low[x.rank - 1 - i], high[x.rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    if all(isinstance(n, int) and n == 0 for n in (*low, *high)):
        return x
    return b.emit(prims.pad, x, tuple(low), tuple(high), b.number(value, x))


def _mirrored(i: Value, size: Size) -> Value:
    """Positions outside [0, size) reflected at the ends, which are not repeated."""
    last = size - 1
    return last - (last - i.map(prims.abs)).map(prims.abs)


def _nearest_inside(i: Value, size: Size) -> Value:
    return i.maximum(0).minimum(size - 1)


def _pad_indices(
    b: Builder,
    place: Callable[[Value, Size], Value],
    spatial: Sequence[Size],
    padding: Sequence[Size],
    device: torch.device,
) -> list[Value]:
    rank = len(spatial)
    indices = []
    for d, size in enumerate(spatial):
        low, high = padding[2 * (rank - 1 - d)], padding[2 * (rank - 1 - d) + 1]
        i = place(b.iota(size + low + high, device, start=-low), size)
        indices.append(i.unsqueeze(*range(1, rank - d)))
    return indices


def _indexed_pad(place: Callable[[Value, Size], Value], rank: int) -> Rule:
    def rule(b: Builder, x: Value, padding: Sequence[Size]) -> Value:
        lead = x.rank - rank
        indices = _pad_indices(b, place, x.shape[lead:], padding, x.device)
        return b.emit(prims.index, x, (*(None,) * lead, *indices), False)

    return rule


def _indexed_pad_backward(place: Callable[[Value, Size], Value], rank: int) -> Rule:
    def rule(b: Builder, grad: Value, x: Value, padding: Sequence[Size]) -> Value:
        lead = x.rank - rank
        indices = _pad_indices(b, place, x.shape[lead:], padding, x.device)
        g = grad.compute()
        zeros = b.full(x.shape, 0, g.dtype, g.device)
        return b.emit(prims.index_put, zeros, (*(None,) * lead, *indices), g, True, False).to(grad.dtype)

    return rule


for _rank in (1, 2, 3):
    for _name, _how in (("reflection", _mirrored), ("replication", _nearest_inside)):
        OP.rule(f"{_name}_pad{_rank}d")(_indexed_pad(_how, _rank))
        OP.rule(f"{_name}_pad{_rank}d_backward")(_indexed_pad_backward(_how, _rank))


# --- joins of matrices -----------------------------------------------------------------------------
@OP.formula("block_diag")
def _block_diag(tensors: Sequence[TensorLike]) -> TensorSpec:
    rows: Size = 0
    columns: Size = 0
    dtype = tensors[0].dtype
    for t in tensors:
        refuse(t.dim() > 2, "torch.block_diag: Input tensors must have 2 or fewer dimensions")
        rows = rows + (t.shape[0] if t.dim() == 2 else 1)
        columns = columns + (t.shape[-1] if t.dim() else 1)
        dtype = torch.promote_types(dtype, t.dtype)
    return contiguous(tensors[0], (rows, columns), dtype)


@OP.rule("block_diag")
def _lower_block_diag(b: Builder, tensors: Sequence[Value]) -> Value:
    dtype = result_type(tensors)
    blocks = [t.to(dtype).reshape((*(1,) * (2 - t.rank), *t.shape)) for t in tensors]
    width: Size = 0
    for t in blocks:
        width = width + t.shape[1]
    rows: list[Value] = []
    start: Size = 0
    for t in blocks:
        rows.append(b.emit(prims.pad, t, (0, start), (0, width - start - t.shape[1]), b.number(0, t)))
        start = start + t.shape[1]
    return b.cat(rows, 0)


@OP.formula("_chunk_cat")
def _chunk_cat(tensors: Sequence[TensorLike], dim: int, num_chunks: int) -> TensorSpec:
    first = tensors[0]
    at = wrap_dim(dim, first.dim())
    width: Size = 0
    for t in tensors:
        chunk = (t.shape[at] + num_chunks - 1) // num_chunks
        for size in t.shape[at + 1 :]:
            chunk = chunk * size
        width = width + chunk
    return contiguous(first, (*first.shape[:at], num_chunks, width))


@OP.refuses("_chunk_cat")
def _refuse_chunk_cat(tensors: Sequence[TensorLike], dim: int, num_chunks: int) -> None:
    refuse(num_chunks < 1, "_chunk_cat expects positive num_chunks")
    refuse(not tensors, "_chunk_cat expects a non-empty input tensor list")
    refuse(any(is_empty(s) for t in tensors for s in t.shape), "_chunk_cat expects non-empty tensor")
    ranks = {t.dim() for t in tensors}
    refuse(dim < 0 and len(ranks) > 1, "_chunk_cat expects non-negative dim when input tensors have different ndims")
    at = dim if dim >= 0 else wrap_dim(dim, min(ranks))
    refuse(at >= min(ranks), "_chunk_cat expects dim < ndim for all input tensors")
    lead = tuple(tensors[0].shape[:at])
    refuse(any(tuple(t.shape[:at]) != lead for t in tensors), "_chunk_cat expects same sizes of 0,...,dim-1 dimensions")


@OP.rule("_chunk_cat?")
def _lower_chunk_cat(b: Builder, tensors: Sequence[Value], dim: int, num_chunks: int) -> Value:
    """Each tensor's `dim` padded to a multiple of the chunks, each chunk flattened, chunks of all tensors joined."""
    parts = []
    for t in tensors:
        axis = t.dim(dim)
        size = (t.shape[axis] + num_chunks - 1) // num_chunks
        high = tuple(size * num_chunks - t.shape[axis] if d == axis else 0 for d in range(t.rank))
        padded = b.emit(prims.pad, t, (0,) * t.rank, high, b.number(0, t)) if not same_size(high[axis], 0) else t
        parts.append(padded.reshape((*t.shape[:axis], num_chunks, product((size, *t.shape[axis + 1 :])))))
    return b.cat(parts, parts[0].rank - 1)


@OP.refuses("narrow_copy")
def _refuse_narrow_copy(x: TensorLike, dim: int, start: Size, length: Size) -> None:
    refuse(dim >= x.dim(), lambda: f"Expected dim < {x.dim()}, but got {dim}")
    size = x.shape[wrap_dim(dim, x.dim())]
    refuse(start > size or start < -size, lambda: f"start out of range [{-size}, {size}], but got {start}", IndexError)
    begin = start + size if start < 0 else start
    refuse(
        length < 0 or begin + length > size,
        lambda: f"start ({begin}) + length ({length}) exceeds dimension size ({size}).",
    )


@OP.rule("narrow_copy")
def _lower_narrow_copy(b: Builder, x: Value, dim: int, start: Size, length: Size) -> Value:
    dim = x.dim(dim)
    start = start + x.shape[dim] if start < 0 else start
    return x.slice(dim, start, start + length)


# --- without a rule of their own ------------------------------------------------------------------
def _padded(spatial: int) -> Formula:
    def formula(x: TensorLike, padding: Sequence[Size]) -> TensorSpec:
        shape = list(x.shape)
        for i in range(spatial):
            shape[-1 - i] = shape[-1 - i] + padding[2 * i] + padding[2 * i + 1]
        return laid_out_on_cpu(x, tuple(shape))

    return formula


def _refuse_padded(spatial: int, reflects: bool) -> Refusal:
    def check(x: TensorLike, padding: Sequence[Size]) -> None:
        refuse(len(padding) != 2 * spatial, lambda: f"padding size is expected to be {2 * spatial}")
        refuse_batch("padding", x, spatial)
        for i in range(spatial):
            size, low, high = x.shape[-1 - i], padding[2 * i], padding[2 * i + 1]
            refuse(
                reflects and (low >= size or high >= size),
                lambda: (
                    f"Padding size should be less than the corresponding input dimension, but got: padding ({low}, "
                    f"{high}) at dimension {x.dim() - 1 - i} of input {list(x.shape)}"
                ),
            )
            refuse(size + low + high < 1, lambda: f"input of size {size} is too small for padding ({low}, {high})")

    return check


for _spatial in (1, 2, 3):
    OP.formula(f"reflection_pad{_spatial}d", f"replication_pad{_spatial}d")(_padded(_spatial))
    OP.refuses(f"reflection_pad{_spatial}d")(_refuse_padded(_spatial, True))
    OP.refuses(f"replication_pad{_spatial}d")(_refuse_padded(_spatial, False))


@OP.formula("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
          "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")  # fmt: skip
def _pad_backward(grad: TensorLike, x: TensorLike, padding: Sequence[Size]) -> TensorSpec:
    return laid_out_on_cpu(x, tuple(x.shape))


# --- samples ---------------------------------------------------------------------------------------

OP.samples("_chunk_cat", call([reals(4, 3), reals(5)], 0, 2))
OP.samples("cat concat concatenate", call([reals(2, 3), reals(4, 3)]), call([reals(2, 3), reals(2, 0)], 1))
OP.samples("as_strided_scatter", call(reals(12), reals(2, 3), [2, 3], [6, 2], 1))
OP.samples("channel_shuffle native_channel_shuffle", call(reals(2, 6, 3, 4), 3))
OP.samples("constant_pad_nd", call(reals(2, 3), [1, 0, 0, 2], 4), call(reals(4, 5), [-1, 2]))
OP.samples("diag_embed", call(reals(2, 3)), call(reals(2, 3), 1, 0, 2))
OP.samples("diagonal_backward", call(reals(3), [3, 4], 1, 0, 1))
OP.samples("diagonal_scatter", call(reals(3, 4), reals(3), 1))
OP.samples("narrow_copy", call(reals(3, 5), 1, 1, 3))
OP.samples("pixel_shuffle", call(reals(2, 12, 3, 4), 2))
OP.samples("pixel_unshuffle", call(reals(2, 3, 4, 6), 2))
OP.samples("reflection_pad1d replication_pad1d", call(reals(2, 3, 5), [1, 2]))
OP.samples("reflection_pad1d_backward replication_pad1d_backward", call(reals(2, 3, 8), reals(2, 3, 5), [1, 2]))
OP.samples("reflection_pad2d replication_pad2d", call(reals(2, 3, 5, 4), [1, 2, 0, 1]))
OP.samples(
    "reflection_pad2d_backward replication_pad2d_backward", call(reals(2, 3, 6, 7), reals(2, 3, 5, 4), [1, 2, 0, 1])
)
OP.samples("reflection_pad3d replication_pad3d", call(reals(2, 3, 3, 5, 4), [1, 2, 0, 1, 1, 1]))
OP.samples(
    "reflection_pad3d_backward replication_pad3d_backward",
    call(reals(2, 3, 5, 6, 7), reals(2, 3, 3, 5, 4), [1, 2, 0, 1, 1, 1]),
)
OP.samples("repeat", call(reals(2, 3), [2, 1, 2]))
OP.samples("roll", call(reals(4, 5), [1, -2], [0, 1]), call(reals(4, 5), [3]))
OP.samples("select_backward", call(reals(3), [3, 4], 1, -1))
OP.samples("select_scatter", call(reals(3, 4), reals(3), 1, 2))
OP.samples("slice_backward", call(reals(3, 2), [3, 5], 1, 1, 5, 2))
OP.samples("slice_scatter", call(reals(5, 4), reals(5, 2), 1, 0, 4, 2))
OP.samples("unfold_backward", call(reals(2, 3, 3), [2, 7], 1, 3, 2))
