"""Operators that make tensors from sizes or like another tensor, copies and conversions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake.build import Table
from primtorch.layout import Sizes, contiguous_strides, dense_like, format_strides
from primtorch.placement import resolved_device
from primtorch.promotion import number_dtype
from primtorch.spec import Size, TensorSpec

TABLE = Table()


def _made(size: Sequence[Size], dtype: torch.dtype | None, device: Any, memory_format: Any = None) -> TensorSpec:
    shape: Sizes = tuple(size)
    if any(type(s) is int and s < 0 for s in shape):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(s for s in shape)}: {list(shape)}")
    strides = contiguous_strides(shape) if memory_format is None else format_strides(shape, memory_format)
    return TensorSpec(shape, strides, dtype or torch.get_default_dtype(), resolved_device(device))


@TABLE.op("empty.memory_format", "zeros", "ones")
def _empty(
    size: Sequence[Size],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> TensorSpec:
    return _made(size, dtype, device, memory_format)


@TABLE.op("rand", "randn", "rand.generator", "randn.generator")
def _rand(
    size: Sequence[Size],
    *,
    generator: Any = None,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> TensorSpec:
    return _made(size, dtype, device)


@TABLE.op("randint", "randint.generator")
def _randint(
    high: Any,
    size: Sequence[Size],
    *,
    generator: Any = None,
    dtype: torch.dtype | None = torch.int64,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> TensorSpec:
    return _made(size, dtype or torch.int64, device)


@TABLE.op("randint.low", "randint.low_generator")
def _randint_low(low: Any, high: Any, size: Sequence[Size], **options: Any) -> TensorSpec:
    return _randint(high, size, **options)


@TABLE.op("randperm", "randperm.generator")
def _randperm(n: Size, *, dtype: torch.dtype | None = torch.int64, device: Any = None, **options: Any) -> TensorSpec:
    return _made((n,), dtype or torch.int64, device)


@TABLE.op("full")
def _full(
    size: Sequence[Size], value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> TensorSpec:
    return _made(size, dtype or number_dtype(value), device)


@TABLE.op("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:
    return _made((), dtype, device)


@TABLE.op("empty_strided")
def _empty_strided(
    size: Sequence[Size],
    stride: Sequence[Size],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> TensorSpec:
    return TensorSpec(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), resolved_device(device))


@TABLE.op("empty_permuted")
def _empty_permuted(
    size: Sequence[Size],
    physical_layout: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> TensorSpec:
    strides: list[Size] = [0] * len(size)
    step: Size = 1
    for dim in reversed(physical_layout):
        strides[dim] = step
        step = step * size[dim]
    return TensorSpec(tuple(size), tuple(strides), dtype or torch.get_default_dtype(), resolved_device(device))


def like_strides(x: Any, memory_format: torch.memory_format | None) -> Sizes:
    """Strides of an `*_like` result; None means preserve_format."""
    shape = tuple(x.shape)
    if memory_format is None or memory_format is torch.preserve_format:
        return dense_like(shape, x.stride())
    return format_strides(shape, memory_format)


@TABLE.op("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like")
def _like(
    x: Any, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: torch.memory_format | None = None, generator: Any = None,
) -> TensorSpec:  # fmt: skip
    return TensorSpec(
        tuple(x.shape),
        like_strides(x, memory_format),
        dtype or x.dtype,
        x.device if device is None else resolved_device(device),
    )


@TABLE.op("full_like", "randint_like")
def _full_like(x: Any, value: Any, **options: Any) -> TensorSpec:
    return _like(x, **options)


@TABLE.op("randint_like.low_dtype")
def _randint_like(x: Any, low: Any, high: Any, **options: Any) -> TensorSpec:
    return _like(x, **options)


@TABLE.op("new_empty", "new_zeros", "new_ones")
def _new(
    x: Any, size: Sequence[Size], *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> TensorSpec:
    return _made(size, dtype or x.dtype, x.device if device is None else device)


@TABLE.op("new_full")
def _new_full(x: Any, size: Sequence[Size], value: Any, **options: Any) -> TensorSpec:
    return _new(x, size, **options)


@TABLE.op("new_empty_strided")
def _new_empty_strided(
    x: Any,
    size: Sequence[Size],
    stride: Sequence[Size],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> TensorSpec:
    return TensorSpec(
        tuple(size), tuple(stride), dtype or x.dtype, x.device if device is None else resolved_device(device)
    )


@TABLE.op("clone")
def _clone(x: Any, *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    return TensorSpec(tuple(x.shape), like_strides(x, memory_format), x.dtype, x.device)


@TABLE.op("contiguous")
def _contiguous(x: Any, *, memory_format: torch.memory_format = torch.contiguous_format) -> TensorSpec:
    return _clone(x, memory_format=memory_format)


@TABLE.op("_to_copy")
def _to_copy(
    x: Any, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: torch.memory_format | None = None,
) -> TensorSpec:  # fmt: skip
    return _like(x, dtype=dtype, device=device, memory_format=memory_format)


@TABLE.op("arange")
def _arange(end: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:
    return _arange_step(0, end, 1, dtype=dtype, device=device)


@TABLE.op("arange.start")
def _arange_start(
    start: Any, end: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> TensorSpec:
    return _arange_step(start, end, 1, dtype=dtype, device=device)


@TABLE.op("arange.start_step")
def _arange_step(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> TensorSpec:
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (step > 0 and start > end) or (step < 0 and start < end):
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    whole = all(isinstance(v, int | torch.SymInt) for v in (start, end, step))
    if whole:
        length = (end - start + step - 1) // step if step > 0 else (start - end - step - 1) // -step
    else:
        length = -int((float(start) - float(end)) // float(step))
    if dtype is None:
        dtype = torch.int64 if whole else torch.get_default_dtype()
    return _made((length,), dtype, device)


@TABLE.op(
    "linspace",
    "linspace.Tensor_Tensor",
    "linspace.Tensor_Scalar",
    "linspace.Scalar_Tensor",
    "logspace",
    "logspace.Tensor_Tensor",
    "logspace.Tensor_Scalar",
    "logspace.Scalar_Tensor",
)
def _linspace(
    start: Any,
    end: Any,
    steps: Size,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> TensorSpec:
    if dtype is None and any(isinstance(v, complex) for v in (start, end)):
        dtype = number_dtype(1j)
    return _made((steps,), dtype, device)


@TABLE.op("eye")
def _eye(n: Size, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:
    return _made((n, n), dtype, device)


@TABLE.op("eye.m")
def _eye_m(n: Size, m: Size, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:
    return _made((n, m), dtype, device)


@TABLE.op("tril_indices")
def _tril_indices(
    row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = torch.int64, device: Any = None, **options: Any
) -> TensorSpec:
    lengths = [min(max(r + offset + 1, 0), col) for r in range(row)]
    return _made((2, sum(lengths)), dtype or torch.int64, device)


@TABLE.op("triu_indices")
def _triu_indices(
    row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = torch.int64, device: Any = None, **options: Any
) -> TensorSpec:
    lengths = [col - min(max(r + offset, 0), col) for r in range(row)]
    return _made((2, sum(lengths)), dtype or torch.int64, device)


@TABLE.op("resize_")
def _resize(x: Any, size: Sequence[Size], *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    return TensorSpec(
        tuple(size), format_strides(tuple(size), memory_format or torch.contiguous_format), x.dtype, x.device
    )


@TABLE.op("resize_as_")
def _resize_as(x: Any, template: Any, *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    strides = like_strides(template, memory_format)
    return TensorSpec(tuple(template.shape), strides, x.dtype, x.device)


@TABLE.op("set_.source_Tensor")
def _set_tensor(x: Any, source: Any) -> TensorSpec:
    return TensorSpec(tuple(source.shape), source.stride(), x.dtype, x.device, source.storage_offset())


@TABLE.op("set_.source_Tensor_storage_offset", "set_.source_Storage_storage_offset")
def _set_storage(x: Any, source: Any, offset: Size, size: Sequence[Size], stride: Sequence[Size] = ()) -> TensorSpec:
    shape = tuple(size)
    return TensorSpec(shape, tuple(stride) or contiguous_strides(shape), x.dtype, x.device, offset)
