"""Prims that make, convert and re-shape tensors: conversion, creation, random, view and shape families."""

# ruff: noqa: B023 -- the messages of checks are built at once, in the iteration that fails
from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch.arguments import Number, Sizes
from primtorch.layout import (
    certainly_equal,
    channels_last_strides,
    contiguous_strides,
    dense_like,
    elementwise_strides,
    is_channels_last,
    is_contiguous,
    product,
    same_shape,
    view_strides,
)
from primtorch.prims import philox
from primtorch.prims.record import Prim, require, require_dim, require_dims, spec_like
from primtorch.spec import Size, TensorSpec

aten = torch.ops.aten

_REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX_OF = {real: cplx for cplx, real in _REAL_OF.items()}


# --- conversion ----------------------------------------------------------------------------------
def _convert_meta(t: TensorSpec, dtype: torch.dtype, rounded: bool = False) -> TensorSpec:
    return spec_like(t, t.shape, dense_like(t.shape, t.strides), dtype)


def _convert(t: torch.Tensor, dtype: torch.dtype, rounded: bool = False) -> torch.Tensor:
    return torch.empty_like(t, dtype=dtype).copy_(
        t.real if t.is_complex() and not dtype.is_complex and dtype is not torch.bool else t
    )


def _bitcast_meta(t: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    require(t.dtype.itemsize == dtype.itemsize, "bitcast", lambda: f"{t.dtype} and {dtype} differ in width")
    return spec_like(t, t.shape, t.strides, dtype, t.offset)


def _device_put_meta(t: TensorSpec, device: torch.device) -> TensorSpec:
    return TensorSpec(t.shape, dense_like(t.shape, t.strides), t.dtype, torch.device(device))


def _view_as_real_meta(t: TensorSpec) -> TensorSpec:
    require(t.dtype in _REAL_OF, "view_as_real", lambda: f"expects a complex tensor, got {t.dtype}")
    return spec_like(t, (*t.shape, 2), (*(s * 2 for s in t.strides), 1), _REAL_OF[t.dtype], t.offset * 2)


def _view_as_complex_meta(t: TensorSpec) -> TensorSpec:
    require(t.dtype in _COMPLEX_OF, "view_as_complex", lambda: f"expects a real tensor, got {t.dtype}")
    require(len(t.shape) > 0 and t.shape[-1] == 2, "view_as_complex", lambda: "the last dimension must have size 2")
    return spec_like(t, t.shape[:-1], tuple(s // 2 for s in t.strides[:-1]), _COMPLEX_OF[t.dtype], t.offset // 2)


def _complex_meta(re: TensorSpec, im: TensorSpec) -> TensorSpec:
    require(re.dtype == im.dtype and re.dtype in _COMPLEX_OF, "complex", lambda: f"got {re.dtype} and {im.dtype}")
    require(same_shape(re.shape, im.shape), "complex", lambda: f"shapes {tuple(re.shape)} and {tuple(im.shape)}")
    strides = elementwise_strides(tuple(re.shape), [tuple(re.strides), tuple(im.strides)])
    return spec_like(re, re.shape, strides, _COMPLEX_OF[re.dtype])


convert_element_type = Prim(
    "convert_element_type(t: Tensor, dtype: dtype, rounded: bool = False) -> Tensor",
    "conversion",
    "t in another dtype, rounded to nearest even; float to integer truncates; anything to bool is t != 0; "
    "complex to real keeps the real part. A backend that computes bfloat16 and float16 in float32 may keep the digits "
    "until the result is stored, unless `rounded` says that the program asked for the rounding.",
    _convert_meta,
    _convert,
    frozenset({"pointwise"}),
)
bitcast = Prim(
    "bitcast(t: Tensor, dtype: dtype) -> Tensor",
    "conversion",
    "The same bits read as another dtype of the same width.",
    _bitcast_meta,
    lambda t, dtype: t.view(dtype),
    frozenset({"pointwise"}),
)
device_put = Prim(
    "device_put(t: Tensor, device: device) -> Tensor",
    "conversion",
    "t copied to a device.",
    _device_put_meta,
    lambda t, device: t.to(device, copy=True),
)
view_as_real = Prim(
    "view_as_real(t: Tensor) -> Tensor",
    "conversion",
    "A complex tensor as a real one with a last dimension (re, im).",
    _view_as_real_meta,
    torch.view_as_real,
    frozenset({"view"}),
)
view_as_complex = Prim(
    "view_as_complex(t: Tensor) -> Tensor",
    "conversion",
    "The inverse of view_as_real.",
    _view_as_complex_meta,
    lambda t: torch.view_as_complex(t if t.stride(-1) == 1 else t.contiguous()),
    frozenset({"view"}),
)
complex = Prim(
    "complex(re: Tensor, im: Tensor) -> Tensor",
    "conversion",
    "re + i*im.",
    _complex_meta,
    torch.complex,
    frozenset({"pointwise"}),
)


# --- creation ------------------------------------------------------------------------------------
def _full_meta(shape: Sequence[Size], value: Number, dtype: torch.dtype, device: torch.device) -> TensorSpec:
    return TensorSpec(tuple(shape), contiguous_strides(tuple(shape)), dtype, torch.device(device))


def _iota_meta(length: Size, start: Size, step: Size, dtype: torch.dtype, device: torch.device) -> TensorSpec:
    require(
        not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool,
        "iota",
        lambda: f"dtype must be an integer's, got {dtype}",
    )
    return TensorSpec((length,), (1,), dtype, torch.device(device))


def _iota(length: int, start: int, step: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(length, dtype=dtype, device=device) * step + start


def _empty_strided_meta(
    shape: Sequence[Size], strides: Sequence[Size], dtype: torch.dtype, device: torch.device
) -> TensorSpec:
    require(len(shape) == len(strides), "empty_strided", lambda: f"{len(shape)} sizes and {len(strides)} strides")
    return TensorSpec(tuple(shape), tuple(strides), dtype, torch.device(device))


full = Prim(
    "full(shape: Sizes, value: Number, dtype: dtype, device: device) -> Tensor",
    "creation",
    "A row-major tensor with every element `value`.",
    _full_meta,
    lambda shape, value, dtype, device: torch.full(shape, value, dtype=dtype, device=device),
    frozenset({"pointwise"}),
)
iota = Prim(
    "iota(length: Size, start: Size, step: Size, dtype: dtype, device: device) -> Tensor",
    "creation",
    "out[i] = start + i*step for 0 <= i < length, in an integer dtype.",
    _iota_meta,
    _iota,
    frozenset({"pointwise"}),
)
empty_strided = Prim(
    "empty_strided(shape: Sizes, strides: Sizes, dtype: dtype, device: device) -> Tensor",
    "creation",
    "Memory with unspecified contents.",
    _empty_strided_meta,
    lambda shape, strides, dtype, device: torch.empty_strided(shape, strides, dtype=dtype, device=device),
)


# --- random --------------------------------------------------------------------------------------
def _seed_meta(device: torch.device) -> TensorSpec:
    return TensorSpec((), (), torch.int64, torch.device(device))


def _uniform_meta(
    seed: TensorSpec, shape: Sequence[Size], stream: int = 0, dtype: torch.dtype = torch.float32
) -> TensorSpec:
    require(seed.dtype is torch.int64 and len(seed.shape) == 0, "random_uniform", lambda: "seed is a 0-d int64 tensor")
    require(dtype.is_floating_point, "random_uniform", lambda: f"draws floating-point numbers, not {dtype}")
    return TensorSpec(tuple(shape), contiguous_strides(tuple(shape)), dtype, seed.device)


def _bits_meta(seed: TensorSpec, shape: Sequence[Size], stream: int = 0, width: int = 32) -> TensorSpec:
    require(seed.dtype is torch.int64 and len(seed.shape) == 0, "random_bits", lambda: "seed is a 0-d int64 tensor")
    require(width in (32, 64), "random_bits", lambda: f"gives 32 or 64 bits, not {width}")
    return TensorSpec(tuple(shape), contiguous_strides(tuple(shape)), torch.int64, seed.device)


random_seed = Prim(
    "random_seed(device: device) -> Tensor",
    "random",
    "A 0-d int64 seed in [0, 2^63) drawn from the device's default generator: equal torch.manual_seed, equal draws. "
    "The generator moves on with each call, so two calls are never merged.",
    _seed_meta,
    lambda device: torch.empty((), dtype=torch.int64, device=device).random_(),
    frozenset({"effect"}),
)
random_uniform = Prim(
    "random_uniform(seed: Tensor, shape: Sizes, stream: int = 0, dtype: dtype = torch.float32) -> Tensor",
    "random",
    "In [0, 1): k * 2^-d, d the digits of the dtype's significand (bfloat16 8, float16 11, float32 24, float64 53) and "
    "k the highest d bits of random_bits(seed, shape, stream), of width 64 for float64.",
    _uniform_meta,
    philox.uniform,
    frozenset({"pointwise", "random"}),
)
random_bits = Prim(
    "random_bits(seed: Tensor, shape: Sizes, stream: int = 0, width: int = 32) -> Tensor",
    "random",
    "int64 in [0, 2^32): element i of the row-major order is word i mod 4 of Philox4x32-10 with key "
    "(seed mod 2^32, seed >> 32) and counter (q mod 2^32, q >> 32, stream, 0), q = i // 4. Of width 64: any int64, "
    "element i has the words 2i (its low half) and 2i + 1 of that sequence.",
    _bits_meta,
    philox.bits,
    frozenset({"pointwise", "random"}),
)


# --- view ----------------------------------------------------------------------------------------
def _expand_meta(t: TensorSpec, shape: Sequence[Size]) -> TensorSpec:
    lead = len(shape) - len(t.shape)
    require(lead >= 0, "expand", lambda: f"a tensor of rank {len(t.shape)} does not expand to rank {len(shape)}")
    strides: list[Size] = [0] * lead
    for size, stride, target in zip(t.shape, t.strides, shape[lead:], strict=True):
        if size is target or certainly_equal(size, target):
            strides.append(stride)
        else:
            require(
                isinstance(size, int) and size == 1,
                "expand",
                lambda: f"shape {tuple(t.shape)} does not expand to {tuple(shape)}",
            )
            strides.append(0)
    return spec_like(t, shape, strides, offset=t.offset)


def _permute_meta(t: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    require_dims("permute", dims, len(t.shape))
    require(len(dims) == len(t.shape), "permute", lambda: f"{len(dims)} dims for a tensor of rank {len(t.shape)}")
    return spec_like(t, [t.shape[d] for d in dims], [t.strides[d] for d in dims], offset=t.offset)


def _reshape_meta(t: TensorSpec, shape: Sequence[Size]) -> TensorSpec:
    require(
        product(t.shape) == product(shape),
        "reshape",
        lambda: f"shape {tuple(shape)} does not hold the elements of {tuple(t.shape)}",
    )
    strides = view_strides(t.shape, t.strides, tuple(shape))
    if strides is None:
        return spec_like(t, shape, contiguous_strides(tuple(shape)))
    return spec_like(t, shape, strides, offset=t.offset)


def _squeeze_meta(t: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    require_dims("squeeze", dims, len(t.shape))
    for dim in dims:
        require(t.shape[dim] == 1, "squeeze", lambda: f"dimension {dim} has size {t.shape[dim]}")
    keep = [d for d in range(len(t.shape)) if d not in dims]
    return spec_like(t, [t.shape[d] for d in keep], [t.strides[d] for d in keep], offset=t.offset)


def _unsqueeze_meta(t: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    rank = len(t.shape) + len(dims)
    require_dims("unsqueeze", dims, rank)
    shape: list[Size] = list(t.shape)
    strides: list[Size] = list(t.strides)
    for dim in sorted(dims):
        strides.insert(dim, shape[dim] * strides[dim] if dim < len(shape) else 1)
        shape.insert(dim, 1)
    return spec_like(t, shape, strides, offset=t.offset)


def _unsqueeze(t: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for dim in sorted(dims):
        t = t.unsqueeze(dim)
    return t


def _slice_meta(t: TensorSpec, dim: int, start: Size, stop: Size, step: Size) -> TensorSpec:
    require_dim("slice", dim, len(t.shape))
    shape, strides = list(t.shape), list(t.strides)
    length = stop - start
    shape[dim] = length if isinstance(step, int) and step == 1 else (length + step - 1) // step
    offset = t.offset if isinstance(start, int) and start == 0 else t.offset + start * strides[dim]
    if not (isinstance(step, int) and step == 1):
        strides[dim] = strides[dim] * step
    return spec_like(t, shape, strides, offset=offset)


def _slice(t: torch.Tensor, dim: int, start: int, stop: int, step: int) -> torch.Tensor:
    return torch.ops.aten.slice.Tensor(t, dim, start, stop, step)  # type: ignore[no-any-return]


def _flip_meta(t: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    require_dims("flip", dims, len(t.shape))
    return spec_like(t, t.shape, dense_like(t.shape, t.strides))


def _diagonal_meta(t: TensorSpec, offset: int, dim1: int, dim2: int) -> TensorSpec:
    require_dims("diagonal", (dim1, dim2), len(t.shape))
    rows, columns = t.shape[dim1], t.shape[dim2]
    length = (
        torch.sym_max(torch.sym_min(rows + offset, columns), 0)
        if offset < 0
        else (torch.sym_max(torch.sym_min(rows, columns - offset), 0))
    )
    keep = [d for d in range(len(t.shape)) if d not in (dim1, dim2)]
    start = t.offset
    if length != 0:
        start = start + (offset * t.strides[dim2] if offset >= 0 else -offset * t.strides[dim1])
    return spec_like(
        t,
        [*(t.shape[d] for d in keep), length],
        [*(t.strides[d] for d in keep), t.strides[dim1] + t.strides[dim2]],
        offset=start,
    )


def _unfold_meta(t: TensorSpec, dim: int, size: Size, step: Size) -> TensorSpec:
    if not t.shape:
        return spec_like(t, (size,), (1,), offset=t.offset)
    require_dim("unfold", dim, len(t.shape))
    shape, strides = list(t.shape), list(t.strides)
    shape[dim] = (t.shape[dim] - size) // step + 1
    strides[dim] = strides[dim] * step
    return spec_like(t, [*shape, size], [*strides, t.strides[dim]], offset=t.offset)


def _as_strided_meta(t: TensorSpec, shape: Sequence[Size], strides: Sequence[Size], offset: Size) -> TensorSpec:
    return spec_like(t, shape, strides, offset=offset)


expand = Prim(
    "expand(t: Tensor, shape: Sizes) -> Tensor",
    "view",
    "t repeated along new leading dimensions and along dimensions of size 1; right-aligned; no -1.",
    _expand_meta,
    lambda t, shape: t.expand(shape),
    frozenset({"view"}),
)
permute = Prim(
    "permute(t: Tensor, dims: Dims) -> Tensor",
    "view",
    "out.shape[i] = t.shape[dims[i]].",
    _permute_meta,
    lambda t, dims: t.permute(dims),
    frozenset({"view"}),
)
reshape = Prim(
    "reshape(t: Tensor, shape: Sizes) -> Tensor",
    "view",
    "The elements in row-major order under another shape; no -1.",
    _reshape_meta,
    lambda t, shape: t.reshape(shape),
    frozenset({"view"}),
)
squeeze = Prim(
    "squeeze(t: Tensor, dims: Dims) -> Tensor",
    "view",
    "Without the given dimensions, each of size 1.",
    _squeeze_meta,
    lambda t, dims: t.squeeze(dims),
    frozenset({"view"}),
)
unsqueeze = Prim(
    "unsqueeze(t: Tensor, dims: Dims) -> Tensor",
    "view",
    "With new dimensions of size 1; `dims` are positions in the result.",
    _unsqueeze_meta,
    _unsqueeze,
    frozenset({"view"}),
)
slice = Prim(
    "slice(t: Tensor, dim: int, start: Size, stop: Size, step: Size) -> Tensor",
    "view",
    "Elements start, start+step, ... below stop of one dimension; 0 <= start <= stop <= size, step >= 1.",
    _slice_meta,
    _slice,
    frozenset({"view"}),
)
flip = Prim(
    "flip(t: Tensor, dims: Dims) -> Tensor",
    "view",
    "The given dimensions in reverse order.",
    _flip_meta,
    torch.flip,
    frozenset({"view"}),
)
diagonal = Prim(
    "diagonal(t: Tensor, offset: int, dim1: int, dim2: int) -> Tensor",
    "view",
    "out[..., i] = t[..., i + max(-offset, 0), ..., i + max(offset, 0), ...] over dim1 and dim2; the new dimension is "
    "last.",
    _diagonal_meta,
    torch.diagonal,
    frozenset({"view"}),
)
unfold = Prim(
    "unfold(t: Tensor, dim: int, size: Size, step: Size) -> Tensor",
    "view",
    "out[..., i, ..., j] = t[..., i*step + j, ...] with j a new last dimension of `size`.",
    _unfold_meta,
    lambda t, dim, size, step: t.unfold(dim, size, step),
    frozenset({"view"}),
)
as_strided = Prim(
    "as_strided(t: Tensor, shape: Sizes, strides: Sizes, offset: Size) -> Tensor",
    "view",
    "out[i] = the element at offset + sum(i*strides) of the memory in which t is laid out by its own strides.",
    _as_strided_meta,
    torch.as_strided,
    frozenset({"view"}),
)


# --- shape, materialising ------------------------------------------------------------------------
def _cat_strides(tensors: Sequence[TensorSpec], shape: Sizes) -> Sizes:
    """cat keeps a dense common order of dimensions, as eager does for channels-last."""
    same_rank = [t for t in tensors if len(t.shape) == len(shape)]
    if len(shape) in (4, 5) and same_rank and not any(is_contiguous(t.shape, t.strides) for t in same_rank):
        orders = {elementwise_strides(tuple(t.shape), (tuple(t.strides),)) == tuple(t.strides) for t in same_rank}
        if orders == {True}:
            return elementwise_strides(shape, (tuple(same_rank[0].strides),))
    return contiguous_strides(shape)


def _cat_meta(tensors: Sequence[TensorSpec], dim: int) -> TensorSpec:
    require(len(tensors) > 0, "cat", lambda: "needs at least one tensor")
    first = tensors[0]
    require_dim("cat", dim, len(first.shape))
    total: Size = 0
    for t in tensors:
        require(t.dtype == first.dtype, "cat", lambda: f"dtypes {t.dtype} and {first.dtype}")
        require(
            len(t.shape) == len(first.shape)
            and all(a is b or a == b for i, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if i != dim),
            "cat",
            lambda: f"shapes {tuple(t.shape)} and {tuple(first.shape)} differ outside dimension {dim}",
        )
        total = total + t.shape[dim]
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    return spec_like(first, shape, _cat_strides(tensors, shape))


def _pad_meta(t: TensorSpec, low: Sequence[Size], high: Sequence[Size], value: Number) -> TensorSpec:
    require(len(low) == len(high) == len(t.shape), "pad", lambda: f"{len(low)} and {len(high)} for {len(t.shape)} dims")
    shape = [size + a + b for size, a, b in zip(t.shape, low, high, strict=True)]
    for size in shape:
        require(not isinstance(size, int) or size >= 0, "pad", lambda: f"the result would have shape {tuple(shape)}")
    return spec_like(t, shape, _pad_strides(t, tuple(shape)))


def _pad_strides(t: TensorSpec, shape: Sizes) -> Sizes:
    """In the order of what is padded. Over symbols its strides are not held against the larger sizes: whether they are
    those by chance would be a guard, and a program for each answer."""
    if any(isinstance(size, torch.SymInt) for size in (*shape, *t.shape)):
        if is_contiguous(t.shape, t.strides):
            return contiguous_strides(shape)
        if is_channels_last(t.shape, t.strides):
            return channels_last_strides(shape)
    return elementwise_strides(shape, (tuple(dense_like(t.shape, t.strides)),))


def _pad(t: torch.Tensor, low: Sequence[int], high: Sequence[int], value: Number) -> torch.Tensor:
    flat = [n for a, b in zip(reversed(low), reversed(high), strict=True) for n in (a, b)]
    spec = _pad_meta(TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.device), low, high, value)
    out = torch.empty_strided(spec.shape, spec.strides, dtype=t.dtype, device=t.device)
    return out.copy_(torch.ops.aten.constant_pad_nd.default(t, flat, value))


def _copy_strided_meta(t: TensorSpec, strides: Sequence[Size]) -> TensorSpec:
    require(len(strides) == len(t.shape), "copy_strided", lambda: f"{len(strides)} strides for rank {len(t.shape)}")
    return spec_like(t, t.shape, strides)


def _slice_scatter_meta(t: TensorSpec, src: TensorSpec, dim: int, start: Size, stop: Size, step: Size) -> TensorSpec:
    part = _slice_meta(t, dim, start, stop, step)
    require(
        same_shape(part.shape, src.shape),
        "slice_scatter",
        lambda: f"src has shape {tuple(src.shape)}, the slice {tuple(part.shape)}",
    )
    return spec_like(t, t.shape, dense_like(t.shape, t.strides))


def _copied(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t).copy_(t)


def _slice_scatter(t: torch.Tensor, src: torch.Tensor, dim: int, start: int, stop: int, step: int) -> torch.Tensor:
    out = _copied(t)
    _slice(out, dim, start, stop, step).copy_(src)
    return out


def _as_strided_scatter(
    t: torch.Tensor, src: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    return torch.as_strided_scatter(t, src, shape, strides, offset)


cat = Prim(
    "cat(tensors: tuple[Tensor, ...], dim: int) -> Tensor",
    "shape",
    "The tensors one after another along `dim`; equal ranks, dtypes and other sizes.",
    _cat_meta,
    lambda tensors, dim: torch.cat(list(tensors), dim),
)
pad = Prim(
    "pad(t: Tensor, low: Sizes, high: Sizes, value: Number) -> Tensor",
    "shape",
    "out.shape[d] = low[d] + t.shape[d] + high[d]; new elements are `value`; a negative entry crops.",
    _pad_meta,
    _pad,
)
copy_strided = Prim(
    "copy_strided(t: Tensor, strides: Sizes) -> Tensor",
    "shape",
    "A copy of t with the given strides.",
    _copy_strided_meta,
    lambda t, strides: torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t),
)
slice_scatter = Prim(
    "slice_scatter(t: Tensor, src: Tensor, dim: int, start: Size, stop: Size, step: Size) -> Tensor",
    "shape",
    "t with slice(t, dim, start, stop, step) replaced by src.",
    _slice_scatter_meta,
    _slice_scatter,
)
as_strided_scatter = Prim(
    "as_strided_scatter(t: Tensor, src: Tensor, shape: Sizes, strides: Sizes, offset: Size) -> Tensor",
    "shape",
    "t with as_strided(t, shape, strides, offset) replaced by src.",
    lambda t, src, shape, strides, offset: spec_like(t, t.shape, dense_like(t.shape, t.strides)),
    _as_strided_scatter,
)
roll = Prim(
    "roll(t: Tensor, shifts: Sizes, dims: Dims) -> Tensor",
    "shape",
    "out[(i + shift) mod n] = t[i] along each of `dims`.",
    lambda t, shifts, dims: spec_like(t, t.shape, contiguous_strides(t.shape)),
    lambda t, shifts, dims: torch.roll(t, shifts, dims).contiguous(),
)
