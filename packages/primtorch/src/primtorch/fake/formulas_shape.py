"""Operators that rearrange elements into new memory: cat, pad, flip, scatter of slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake.build import Fresh, Table, common_device, contiguous, refuse_fresh, strided
from primtorch.fake.formulas_view import infer_size
from primtorch.layout import (
    channels_last_strides,
    contiguous_strides,
    dense_like,
    product,
    suggests_channels_last,
    wrap_dim,
)
from primtorch.spec import Size, TensorSpec

TABLE = Table()


@TABLE.op("view_copy")
def _view_copy(x: Any, size: Sequence[Size]) -> TensorSpec:
    """Also where no view fits the strides."""
    return contiguous(x, infer_size(size, product(tuple(x.shape))))


@TABLE.op("cat", "concat", "concatenate")
def _cat(tensors: Sequence[Any], dim: int = 0) -> TensorSpec:
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


@TABLE.op("_chunk_cat")
def _chunk_cat(tensors: Sequence[Any], dim: int, num_chunks: int) -> TensorSpec:
    first = tensors[0]
    at = wrap_dim(dim, first.dim())
    width: Size = 0
    for t in tensors:
        chunk = (t.shape[at] + num_chunks - 1) // num_chunks
        for size in t.shape[at + 1 :]:
            chunk = chunk * size
        width = width + chunk
    return contiguous(first, (*first.shape[:at], num_chunks, width))


@TABLE.op("stack")
def _stack(tensors: Sequence[Any], dim: int = 0) -> TensorSpec:
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
    strides = (*joined.strides[:at], first.shape[at] * joined.strides[at], *joined.strides[at:])
    return TensorSpec(tuple(shape), strides, dtype, joined.device)


@TABLE.op("constant_pad_nd")
def _constant_pad(x: Any, pad: Sequence[Size], value: Any = 0) -> TensorSpec:
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


@TABLE.op("roll")
def _roll(x: Any, shifts: Any, dims: Any = ()) -> TensorSpec:
    shape = tuple(x.shape)
    # On the CPU the pieces are joined by cat, which keeps channels_last.
    if dims and x.device.type == "cpu" and suggests_channels_last(shape, x.stride()):
        return strided(x, shape, channels_last_strides(shape))
    return contiguous(x, shape)


@TABLE.op("diag_embed")
def _diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TensorSpec:
    rank = x.dim() + 1
    size = x.shape[-1] + abs(offset)
    shape: list[Size] = list(x.shape[:-1])
    for dim in sorted((wrap_dim(dim1, rank), wrap_dim(dim2, rank))):
        shape.insert(dim, size)
    return contiguous(x, shape)


@TABLE.op("renorm")
def _renorm(x: Any, p: Any, dim: int, maxnorm: Any) -> TensorSpec:
    return contiguous(x, x.shape)


@TABLE.op("flip")
def _flip(x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    shape = tuple(x.shape)
    return strided(x, shape, dense_like(shape, x.stride()))


@TABLE.op("repeat")
def _repeat(x: Any, repeats: Sequence[Size]) -> TensorSpec:
    lead = len(repeats) - x.dim()
    if lead < 0:
        raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    shape = (1,) * lead + tuple(x.shape)
    return contiguous(x, [s * r for s, r in zip(shape, repeats, strict=True)])


@TABLE.op("tril", "triu")
def _tril(x: Any, diagonal: int = 0) -> TensorSpec:
    if x.dim() < 2:
        raise RuntimeError("tril: input tensor must have at least 2 dimensions")
    return contiguous(x, x.shape)


@TABLE.op("slice_backward")
def _slice_backward(grad: Any, input_sizes: Sequence[Size], *args: Any) -> TensorSpec:
    return contiguous(grad, input_sizes)


@TABLE.op("select_backward", "diagonal_backward", "unfold_backward")
def _select_backward(grad: Any, input_sizes: Sequence[Size], *args: Any) -> TensorSpec:
    return contiguous(grad, input_sizes)


@TABLE.op("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
def _scatter_slice(x: Any, src: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    """In the layout of `x`, gaps included, unless elements of `x` surely share memory."""
    shape, strides = tuple(x.shape), tuple(x.stride())
    expanded = any(
        type(stride) is int and stride == 0 and not (type(size) is int and size == 1)
        for size, stride in zip(shape, strides, strict=True)
    )
    return strided(x, shape, dense_like(shape, strides) if expanded else strides)


@TABLE.op("copy")
def _copy(x: Any, src: Any, non_blocking: bool = False) -> TensorSpec:
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


@TABLE.op("zero")
def _zero(x: Any) -> TensorSpec:
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


@TABLE.op("rot90")
def _rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> TensorSpec:
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


@TABLE.op("block_diag")
def _block_diag(tensors: Sequence[Any]) -> TensorSpec:
    rows: Size = 0
    columns: Size = 0
    dtype = tensors[0].dtype
    for t in tensors:
        rows = rows + (t.shape[0] if t.dim() == 2 else 1)
        columns = columns + (t.shape[-1] if t.dim() else 1)
        dtype = torch.promote_types(dtype, t.dtype)
    return contiguous(tensors[0], (rows, columns), dtype)


@TABLE.op("repeat_interleave.Tensor")
def _repeat_interleave(repeats: Any, *, output_size: Size | None = None, fresh: Fresh = refuse_fresh) -> TensorSpec:
    count = fresh(None) if output_size is None else output_size
    return TensorSpec((count,), (1,), torch.int64, repeats.device)
