"""Operators whose result shares memory with an argument."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from primtorch import prims
from primtorch.arguments import Dims, Sizes, TensorLike
from primtorch.builder import Builder, Value, same_size
from primtorch.families import Family, Trait
from primtorch.layout import alike, product, reduced_dims, view_strides, wrap_dim, wrap_dims
from primtorch.operators.build import contiguous, view
from primtorch.operators.refusals import refuse
from primtorch.operators.written_parts import part_of
from primtorch.promotion import real_of
from primtorch.samples import call, reals
from primtorch.spec import Size, TensorSpec
from primtorch.symbolic import depends_on_data, expected, settled

aten = torch.ops.aten
OP = Family("view")
OP.trait(Trait.ANYWHERE, "is_same_size is_set_to")


_LAST = 2**62  # an end of at least this means "to the end"


def resolved_shape(shape: Sequence[Size], count: Size) -> Sizes:
    """A target shape with its -1 worked out from the number of elements."""
    for place, size in enumerate(shape):
        if isinstance(size, int) and size == -1:
            rest = product([s for i, s in enumerate(shape) if i != place])
            if isinstance(rest, int) and rest == 0:
                raise RuntimeError(
                    f"cannot reshape tensor of 0 elements into shape {list(shape)} because the "
                    "unspecified dimension size -1 can be any value and is ambiguous"
                )
            return (*shape[:place], settled(count // rest), *shape[place + 1 :])
    return tuple(shape)


def infer_size(shape: Sequence[Size], numel: Size) -> Sizes:
    """The shape with -1 replaced.

    Raises:
        RuntimeError: the shape does not have `numel` elements.
    """
    unknown = None
    known: Size = 1
    for dim, size in enumerate(shape):
        if type(size) is int and size < 0:
            if size != -1:
                raise RuntimeError(f"invalid shape dimension {size}")
            if unknown is not None:
                raise RuntimeError("only one dimension can be inferred")
            unknown = dim
        else:
            known = known * size
    if unknown is None:
        if known == numel:
            return tuple(shape)
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {numel}")
    if known == 0:
        raise RuntimeError(
            f"cannot reshape tensor of 0 elements into shape {list(shape)} because the unspecified dimension "
            "size -1 can be "
            "any value and is ambiguous"
        )
    whole: Any = numel  # torch does not say that an int has a rest by a symbol
    if whole % known != 0:
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {numel}")
    filled = list(shape)
    filled[unknown] = settled(numel // known)
    return tuple(filled)


@OP.formula("view", "_unsafe_view")
def _view(x: TensorLike, size: Sequence[Size]) -> TensorSpec:
    old = tuple(x.shape)
    shape = infer_size(size, product(old))
    strides = view_strides(old, x.stride(), shape)
    if strides is None:
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
            "contiguous subspaces). Use .reshape(...) instead."
        )
    return view(x, shape, strides)


@OP.formula("_reshape_alias")
def _reshape_alias(x: TensorLike, size: Sequence[Size], stride: Sequence[Size]) -> TensorSpec:
    return view(x, size, stride)


@OP.formula("view.dtype")
def _view_dtype(x: TensorLike, dtype: torch.dtype) -> TensorSpec:
    old, new = x.dtype.itemsize, dtype.itemsize
    shape, strides, offset = list(x.shape), list(x.stride()), x.storage_offset()
    if old > new:
        if not shape:
            raise RuntimeError("self.dim() cannot be 0 to view a tensor with a smaller element size")
        if strides[-1] != 1:
            raise RuntimeError(f"self.stride(-1) must be 1 to view {x.dtype} as {dtype} (different element sizes)")
        ratio = old // new
        shape[-1] = shape[-1] * ratio
        strides = [s * ratio for s in strides[:-1]] + [1]
        offset = offset * ratio
    elif old < new:
        if not shape:
            raise RuntimeError("self.dim() cannot be 0 to view a tensor with a larger element size")
        ratio = new // old
        if shape[-1] % ratio != 0 or offset % ratio != 0 or strides[-1] != 1:
            raise RuntimeError(
                f"self cannot be viewed as {dtype}: sizes, strides and offset must be divisible by {ratio}"
            )
        shape[-1] = shape[-1] // ratio
        strides = [s // ratio for s in strides[:-1]] + [1]
        offset = offset // ratio
    return TensorSpec(tuple(shape), tuple(strides), dtype, x.device, offset)


@OP.formula("view_copy", "_reshape_copy?")
def _view_copy(x: TensorLike, size: Sequence[Size]) -> TensorSpec:
    """Also where no view fits the strides."""
    return contiguous(x, infer_size(size, product(tuple(x.shape))))


@OP.rule("view", "reshape", "_unsafe_view", "_reshape_alias", "view_copy?", "_reshape_copy?", "_reshape_alias_copy?")
def _lower_view(b: Builder, x: Value, size: Sequence[Size], *strides: object) -> Value:
    return x.reshape(resolved_shape(size, x.numel()))


@OP.rule("_conj", "_conj_copy?")
def _lower_conj(b: Builder, x: Value) -> Value:
    return x.map(prims.conj) if x.dtype.is_complex else x


@OP.rule("_neg_view", "_neg_view_copy?")
def _lower_neg_view(b: Builder, x: Value) -> Value:
    return -x


@OP.rule("view_as_real", "view_as_real_copy?")
def _lower_view_as_real(b: Builder, x: Value) -> Value:
    return b.emit(prims.view_as_real, x)


@OP.rule("view_as_complex", "view_as_complex_copy?")
def _lower_view_as_complex(b: Builder, x: Value) -> Value:
    return b.emit(prims.view_as_complex, x)


@OP.rule("view.dtype", "view_copy.dtype?")
def _lower_view_dtype(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    if x.dtype is dtype:
        return x
    if x.dtype.itemsize == dtype.itemsize:
        return b.emit(prims.bitcast, x, dtype)
    # Elements are joined or split: a call of itself, on rows that lie in memory one after the other.
    row_major = b.contiguous_spec(x.shape, x.dtype, x.spec.device).strides
    dense = x if x.spec.strides == row_major else b.emit(prims.copy_strided, x, row_major)
    shape = (*x.shape[:-1], x.shape[-1] * x.dtype.itemsize // dtype.itemsize)
    spec = b.contiguous_spec(shape, dtype, x.spec.device)
    return b.record(aten.view.dtype, (dense, dtype), {}, spec, "view_dtype")  # type: ignore[no-any-return]


@OP.formula("expand")
def _expand(x: TensorLike, size: Sequence[Size], *, implicit: bool = False) -> TensorSpec:
    shape, strides = x.shape, x.stride()
    lead = len(size) - len(shape)
    if lead < 0:
        raise RuntimeError(
            f"expand({x!r}, size={list(size)}): the number of sizes provided ({len(size)}) must be greater or "
            "equal to the "
            f"number of dimensions in the tensor ({len(shape)})"
        )
    out_shape: list[Size] = []
    out_strides: list[Size] = []
    for dim, wanted in enumerate(size):
        own = shape[dim - lead] if dim >= lead else 1
        if type(wanted) is int and wanted == -1:
            if dim < lead:
                raise RuntimeError(
                    f"The expanded size of the tensor (-1) isn't allowed in a leading, non-existing dimension {dim}"
                )
            wanted = own
        if dim < lead:
            # A leading dim of 1 keeps the stride of a row-major tensor.
            stride: Size = 0
        elif type(own) is int and own == 1 and depends_on_data(wanted):
            stride = 0
        elif own is wanted or own == wanted:
            stride = strides[dim - lead]
        elif own == 1:
            stride = 0
        else:
            raise RuntimeError(
                f"The expanded size of the tensor ({wanted}) must match the existing size ({own}) at "
                "non-singleton dimension "
                f"{dim}.  Target sizes: {list(size)}.  Tensor sizes: {list(shape)}"
            )
        out_shape.append(wanted)
        out_strides.append(stride)
    for dim in range(lead - 1, -1, -1):
        if alike(out_shape[dim], 1):
            following = dim + 1
            out_strides[dim] = out_shape[following] * out_strides[following] if following < len(out_shape) else 1
    return view(x, out_shape, out_strides)


@OP.rule("expand", "expand_copy?")
def _lower_expand(b: Builder, x: Value, size: Sequence[Size], *, implicit: bool = False) -> Value:
    lead = len(size) - x.rank
    shape = tuple(x.shape[i - lead] if isinstance(s, int) and s == -1 else s for i, s in enumerate(size))
    return x.expand(shape)


@OP.formula("permute")
def _permute(x: TensorLike, dims: Sequence[int]) -> TensorSpec:
    if len(dims) != x.dim():
        raise RuntimeError(
            "permute(sparse_coo): number of dimensions in the tensor input does not match the length of the "
            "desired ordering of "
            f"dimensions i.e. input.dim() = {x.dim()} is not equal to len(dims) = {len(dims)}"
        )
    order = wrap_dims(dims, x.dim())
    shape, strides = x.shape, x.stride()
    return view(x, [shape[d] for d in order], [strides[d] for d in order])


@OP.rule("permute", "permute_copy?")
def _lower_permute(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    return x.permute([x.dim(d) for d in dims] if x.rank else [])


@OP.formula("transpose.int", "swapaxes", "swapdims")
def _transpose(x: TensorLike, dim0: int, dim1: int) -> TensorSpec:
    ndim = x.dim()
    a, b = wrap_dim(dim0, ndim), wrap_dim(dim1, ndim)
    shape, strides = list(x.shape), list(x.stride())
    if ndim:
        shape[a], shape[b] = shape[b], shape[a]
        strides[a], strides[b] = strides[b], strides[a]
    return view(x, shape, strides)


@OP.rule("transpose.int", "transpose_copy.int?")
def _lower_transpose(b: Builder, x: Value, dim0: int, dim1: int) -> Value:
    return x.transpose(x.dim(dim0), x.dim(dim1)) if x.rank else x


@OP.formula("t")
def _t(x: TensorLike) -> TensorSpec:
    if x.dim() > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {x.dim()}D")
    return view(x, tuple(x.shape)[::-1], x.stride()[::-1])


@OP.rule("t", "t_copy?")
def _lower_t(b: Builder, x: Value) -> Value:
    return x.transpose(0, 1) if x.rank == 2 else x


@OP.formula("unsqueeze")
def _unsqueeze(x: TensorLike, dim: int) -> TensorSpec:
    at = wrap_dim(dim, x.dim() + 1)
    shape, strides = list(x.shape), list(x.stride())
    stride = shape[at] * strides[at] if at < len(shape) else 1
    shape.insert(at, 1)
    strides.insert(at, stride)
    return view(x, shape, strides)


@OP.rule("unsqueeze", "unsqueeze_copy?")
def _lower_unsqueeze(b: Builder, x: Value, dim: int) -> Value:
    return x.unsqueeze(wrap_dim(dim, x.rank + 1))


def _drop(x: TensorLike, dims: set[int]) -> TensorSpec:
    shape, strides = x.shape, x.stride()
    keep = [d for d in range(len(shape)) if d not in dims or shape[d] != 1]
    return view(x, [shape[d] for d in keep], [strides[d] for d in keep])


@OP.formula("squeeze")
def _squeeze(x: TensorLike) -> TensorSpec:
    return _drop(x, set(range(x.dim())))


@OP.formula("squeeze.dim")
def _squeeze_dim(x: TensorLike, dim: int) -> TensorSpec:
    return _drop(x, {wrap_dim(dim, x.dim())})


@OP.formula("squeeze.dims")
def _squeeze_dims(x: TensorLike, dim: Sequence[int]) -> TensorSpec:
    return _drop(x, set(wrap_dims(dim, x.dim())))


@OP.rule("squeeze", "squeeze.dim", "squeeze.dims", "squeeze_copy?", "squeeze_copy.dim?", "squeeze_copy.dims?")
def _lower_squeeze(b: Builder, x: Value, dims: Dims | None = None) -> Value:
    wanted = range(x.rank) if dims is None else reduced_dims(dims, x.rank, empty_is_all=False)
    return x.squeeze(*(d for d in wanted if same_size(x.shape[d], 1)))


def slice_bound(place: Size | None, size: Size, default: Size) -> Size:
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
    if depends_on_data(place) or depends_on_data(size):
        least: Size = torch.sym_min(place, size)
        return least
    return size if place > size else place  # asked as the formula asks it: equality is one of its two cases


_NO_END = 2**63 - 1


def _clamp_index(index: Size, size: Size) -> Size:
    if index < 0:
        index = index + size
        return 0 if index < 0 else index
    if index is not size and (depends_on_data(index) or depends_on_data(size)):
        least: Size = torch.sym_min(index, size)
        return least
    # `>` rather than `>=`: where a guard is needed, it should allow equality.
    return size if index is size or index > size else index


def slice_bounds(size: Size, start: Size | None, end: Size | None, step: int) -> tuple[Size, Size]:
    """(start, length) of a slice, clamped as Python does.

    Raises:
        RuntimeError: step < 1.
    """
    if step <= 0:
        raise RuntimeError("slice step must be positive")
    first = _clamp_index(0 if start is None else start, size)
    last = size if end is None or (type(end) is int and end >= _NO_END) else _clamp_index(end, size)
    if last is not size and (depends_on_data(first) or depends_on_data(last)):
        last = torch.sym_max(last, first)
    elif last is not size and last < first:
        last = first
    if step == 1:
        return first, last - first
    return first, (last - first + step - 1) // step


@OP.formula("slice.Tensor")
def _slice(
    x: TensorLike, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1
) -> TensorSpec:
    if x.dim() == 0:
        raise IndexError("slice() cannot be applied to a 0-dim tensor.")
    at = wrap_dim(dim, x.dim())
    shape, strides = list(x.shape), list(x.stride())
    first, length = slice_bounds(shape[at], start, end, step)
    offset = x.storage_offset() + first * strides[at]
    shape[at] = length
    strides[at] = strides[at] * step
    return view(x, shape, strides, offset)


@OP.rule("slice.Tensor", "slice_copy.Tensor?")
def _lower_slice(
    b: Builder, x: Value, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Value:
    dim = x.dim(dim)
    size = x.shape[dim]
    start = slice_bound(start, size, 0)
    end = slice_bound(end, size, size)
    end = torch.sym_max(end, start) if depends_on_data(end) or depends_on_data(start) else max(end, start)
    if isinstance(step, int) and step == 1:
        return part_of(b, x, dim, start, end)
    return x.slice(dim, start, end, step)


def select_position(index: Size, size: Size, dim: int) -> Size:
    """The place of an element, counted from the start. Raises IndexError where there is none."""
    if isinstance(size, int) and isinstance(index, int) and not -size <= index < size:
        raise IndexError(f"select(): index {index} out of range for tensor of size {size} at dimension {dim}")
    return index + size if index < 0 else index


@OP.formula("select.int")
def _select(x: TensorLike, dim: int, index: Size) -> TensorSpec:
    if x.dim() == 0:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    at = wrap_dim(dim, x.dim())
    shape, strides = list(x.shape), list(x.stride())
    size = shape[at]
    if index < -size or index >= size:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(shape)} at dimension {at}")
    if index < 0:
        index = index + size
    offset = x.storage_offset() + index * strides[at]
    del shape[at], strides[at]
    return view(x, shape, strides, offset)


@OP.rule("select.int", "select_copy.int?")
def _lower_select(b: Builder, x: Value, dim: int, index: Size) -> Value:
    dim = x.dim(dim)
    return x.select(dim, select_position(index, x.shape[dim], dim))


@OP.refuses("split.Tensor", "unsafe_split.Tensor", "split_copy.Tensor")
def _refuse_split(x: TensorLike, split_size: Size, dim: int = 0) -> None:
    refuse(x.dim() == 0, "split expects at least a 1-dimensional tensor")
    refuse(split_size < 0, lambda: f"split expects split_size be non-negative, but got split_size={split_size}")
    wrap_dim(dim, x.dim())


@OP.refuses("split_with_sizes", "split.sizes", "unsafe_split_with_sizes", "split_with_sizes_copy")
def _refuse_split_with_sizes(x: TensorLike, sizes: Sequence[Size], dim: int = 0) -> None:
    refuse(x.dim() == 0, "split expects at least a 1-dimensional tensor")


@OP.formula("split_with_sizes", "split.sizes")
def _split_with_sizes(x: TensorLike, sizes: Sequence[Size], dim: int = 0) -> list[TensorSpec]:
    at = wrap_dim(dim, x.dim())
    if not all(expected(size >= 0) for size in sizes):
        raise RuntimeError(
            f"split_with_sizes expects split_sizes have only non-negative entries, but got split_sizes={list(sizes)}"
        )
    if not expected(sum(sizes) == x.shape[at]):
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {x.shape[at]} (input tensor's size at "
            f"dimension {at}), "
            f"but got split_sizes={list(sizes)}"
        )
    starts = accumulate(sizes, initial=0)
    return [_narrowed(x, at, start, size) for start, size in zip(starts, sizes, strict=False)]


def _narrowed(x: TensorLike, dim: int, start: Size, length: Size) -> TensorSpec:
    """Elements along a dim that are known to be there."""
    shape = list(x.shape)
    shape[dim] = length
    return view(x, shape, x.stride(), x.storage_offset() + start * x.stride()[dim])


@OP.rule("split_with_sizes", "unsafe_split_with_sizes", "split_with_sizes_copy?")
def _lower_split_with_sizes(b: Builder, x: Value, sizes: Sequence[Size], dim: int = 0) -> tuple[Value, ...]:
    dim = x.dim(dim)
    parts = []
    start: Size = 0
    for size in sizes:
        parts.append(x.slice(dim, start, start + size))
        start = start + size
    return tuple(parts)


@OP.formula("split.Tensor")
def _split(x: TensorLike, split_size: Size, dim: int = 0) -> list[TensorSpec]:
    at = wrap_dim(dim, x.dim())
    size = x.shape[at]
    if split_size == 0:
        if size != 0:
            raise RuntimeError(f"split_size can only be 0 if dimension size is 0, but got dimension size of {size}")
        return [_slice(x, at)]
    pieces = max(1, int((size + split_size - 1) // split_size))
    return [_slice(x, at, k * split_size, (k + 1) * split_size if k + 1 < pieces else size) for k in range(pieces)]


@OP.rule("split.Tensor", "unsafe_split.Tensor", "split_copy.Tensor?")
def _lower_split(b: Builder, x: Value, size: Size, dim: int = 0) -> tuple[Value, ...]:
    dim = x.dim(dim)
    total = x.shape[dim]
    if same_size(size, 0):
        return (x,)
    parts = []
    start: Size = 0
    while start < total:
        stop = total if start + size >= total else start + size
        parts.append(x.slice(dim, start, stop))
        start = start + size
    return tuple(parts) if parts else (x,)


@OP.formula("unbind.int")
def _unbind(x: TensorLike, dim: int = 0) -> list[TensorSpec]:
    at = wrap_dim(dim, x.dim())
    return [_select(x, at, k) for k in range(int(x.shape[at]))]


@OP.rule("unbind.int", "unbind_copy.int?")
def _lower_unbind(b: Builder, x: Value, dim: int = 0) -> tuple[Value, ...]:
    dim = x.dim(dim)
    return tuple(x.select(dim, i) for i in range(int(x.shape[dim])))


@OP.formula("alias", "detach", "lift_fresh", "lift", "_conj", "_neg_view", "resolve_conj", "resolve_neg")
def _alias(x: TensorLike) -> TensorSpec:
    return view(x, x.shape, x.stride())


@OP.rule(
    "alias resolve_conj resolve_neg detach lift_fresh lift alias_copy? detach_copy? lift_fresh_copy? view_as? "
    "_fw_primal?"
)
def _lower_same(b: Builder, x: Value, *rest: object) -> Value:
    return x


@OP.formula("diagonal")
def diagonal(x: TensorLike, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorSpec:
    """The view of the elements x[..., i, i + offset] of two dims, whose dim is the last one.

    Raises:
        IndexError: a dim is none of x's; RuntimeError: the two are one.
    """
    a, b = wrap_dim(dim1, x.dim()), wrap_dim(dim2, x.dim())
    if a == b:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    shape, strides = list(x.shape), list(x.stride())
    rows, columns = (shape[a], shape[b] - offset) if offset >= 0 else (shape[a] + offset, shape[b])
    length = torch.sym_max(torch.sym_min(rows, columns), 0)
    at = x.storage_offset()
    if length != 0:
        at = at + (offset * strides[b] if offset >= 0 else -offset * strides[a])
    step = strides[a] + strides[b]
    for dim in sorted((a, b), reverse=True):
        del shape[dim], strides[dim]
    return view(x, [*shape, length], [*strides, step], at)


@OP.rule("diagonal", "diagonal_copy?")
def _lower_diagonal(b: Builder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dim1, dim2 = x.dim(dim1), x.dim(dim2)
    if dim1 == dim2:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    return b.emit(prims.diagonal, x, offset, dim1, dim2)


@OP.formula("unfold")
def _unfold(x: TensorLike, dimension: int, size: int, step: int) -> TensorSpec:
    refuse(size < 0, lambda: f"size is {size} but must be >= 0")
    refuse(step <= 0, lambda: f"step is {step} but must be > 0")
    at = wrap_dim(dimension, x.dim())
    if x.dim() == 0:
        if size > 1:
            raise RuntimeError(f"maximum size for tensor at dimension 0 is 1 but size is {size}")
        return view(x, (size,), (1,))
    shape, strides = list(x.shape), list(x.stride())
    if size > shape[at]:
        raise RuntimeError(f"maximum size for tensor at dimension {at} is {shape[at]} but size is {size}")
    stride = strides[at]
    shape[at] = (shape[at] - size) // step + 1
    strides[at] = stride * step
    return view(x, [*shape, size], [*strides, stride])


@OP.rule("unfold", "unfold_copy?")
def _lower_unfold(b: Builder, x: Value, dim: int, size: Size, step: Size) -> Value:
    return b.emit(prims.unfold, x, x.dim(dim), size, step)


@OP.formula("as_strided")
def _as_strided(
    x: TensorLike, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None
) -> TensorSpec:
    return view(x, size, stride, storage_offset)


@OP.refuses("as_strided", "as_strided_copy")
def refuse_strides(
    x: TensorLike, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None
) -> None:
    """Raises RuntimeError for sizes, strides and an offset that are those of no tensor."""
    refuse(len(size) != len(stride), "mismatch in length of strides and shape")
    refuse(any(n < 0 for n in size), lambda: f"as_strided: Negative sizes are not supported: {list(size)}")
    refuse(any(n < 0 for n in stride), lambda: f"as_strided: Negative strides are not supported: {list(stride)}")
    refuse(storage_offset is not None and storage_offset < 0, lambda: f"invalid storage offset {storage_offset}")


@OP.rule("as_strided", "as_strided_copy?")
def _lower_as_strided(
    b: Builder, x: Value, size: Sequence[Size], stride: Sequence[Size], offset: Size | None = None
) -> Value:
    return b.emit(
        prims.as_strided,
        x,
        tuple(size),
        tuple(stride),
        x.spec.offset if offset is None else offset,
    )


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("narrow")
def _narrow(x: TensorLike, dim: int, start: Size, length: Size) -> TensorSpec:
    return _slice(x, dim, start, start + length)


@OP.formula("view_as_real")
def _view_as_real(x: TensorLike) -> TensorSpec:
    if not x.is_complex():
        raise RuntimeError("view_as_real is only supported for complex tensors")
    strides = [s * 2 for s in x.stride()]
    return TensorSpec((*x.shape, 2), (*strides, 1), real_of(x.dtype), x.device, x.storage_offset() * 2)


@OP.formula("view_as_complex")
def _view_as_complex(x: TensorLike) -> TensorSpec:
    dtypes = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
    if x.dtype not in dtypes:
        raise RuntimeError(
            f"view_as_complex is only supported for half, float and double tensors, but got a tensor of {x.dtype}"
        )
    if x.dim() == 0 or x.shape[-1] != 2:
        raise RuntimeError("Tensor must have a last dimension of size 2")
    strides = tuple(s // 2 for s in x.stride()[:-1])
    return TensorSpec(tuple(x.shape[:-1]), strides, dtypes[x.dtype], x.device, x.storage_offset() // 2)


# --- samples ---------------------------------------------------------------------------------------

OP.samples("_conj _conj_copy", call(reals(2, 3, dtype=torch.complex64)))
OP.samples("view_as_real view_as_real_copy", call(reals(2, 3, dtype=torch.complex64)))
OP.samples("view_as_complex view_as_complex_copy", call(reals(3, 2)))
OP.samples("_fw_primal", call(reals(2, 3), 0))
OP.samples("_reshape_alias _reshape_alias_copy", call(reals(4, 6), [3, 8], [8, 1]))
OP.samples("view view_copy reshape _reshape_copy _unsafe_view", call(reals(4, 6), [3, -1]), call(reals(1), []))
OP.samples("view.dtype view_copy.dtype", call(reals(2, 4), torch.int32), call(reals(2, 4), torch.int16))
OP.samples("as_strided as_strided_copy", call(reals(12), [2, 3], [1, 2], 3))
OP.samples("expand expand_copy", call(reals(3, 1), [2, -1, 4]))
OP.samples("narrow", call(reals(3, 5), 1, 1, 3))
OP.samples("permute permute_copy", call(reals(2, 3, 4), [2, 0, -2]))
OP.samples("select.int select_copy.int", call(reals(3, 4), 1, -1))
OP.samples("split.Tensor split_copy.Tensor unsafe_split.Tensor", call(reals(5, 3), 2))
OP.samples("split.sizes split_with_sizes split_with_sizes_copy unsafe_split_with_sizes", call(reals(5, 3), [2, 3]))
OP.samples("squeeze.dim squeeze_copy.dim", call(reals(2, 1), 1), call(reals(2, 1), 0))
OP.samples("squeeze.dims squeeze_copy.dims", call(reals(1, 2, 1), [0, 1]))
OP.samples("swapaxes swapdims transpose.int transpose_copy.int", call(reals(2, 3, 4), 0, -1))
OP.samples("unfold unfold_copy", call(reals(2, 7), 1, 3, 2))
OP.samples("unsqueeze unsqueeze_copy", call(reals(2, 3), -1))
