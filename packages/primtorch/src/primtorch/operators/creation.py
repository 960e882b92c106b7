"""Tensors made from sizes or like another tensor, copies and conversions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.builder import Builder, Value, same_size
from primtorch.families import Family, Trait
from primtorch.layout import (
    Sizes,
    channels_last_strides,
    contiguous_strides,
    dense_like,
    format_strides,
    strides_in_order,
)
from primtorch.operators.build import contiguous
from primtorch.operators.elementwise import filled
from primtorch.operators.refusals import refuse
from primtorch.placement import resolved_device
from primtorch.promotion import COMPUTE_DTYPE, TENSORS, number_dtype
from primtorch.spec import Size, TensorSpec

OP = Family("creation")
OP.trait(Trait.ANYWHERE, "_copy_from _to_copy copy copy_ resize_as_")
OP.trait(Trait.TO_FIRST, "copy")
OP.trait(Trait.CONVERTS_OUT, "arange copy empty eye full linspace logspace ones range zeros")
OP.trait(Trait.DTYPE_OF_OUT, "arange empty eye full linspace logspace ones range zeros")
OP.trait(Trait.OVERLAPS, "empty eye full ones tril triu zero zeros")


def with_strides(b: Builder, x: Value, strides: Sequence[Any]) -> Value:
    """x with given strides; a size-1 dimension's stride means nothing but is kept as asked."""
    if tuple(x.spec.strides) == tuple(strides):
        return x
    return b.emit(prims.copy_strided, x, tuple(strides))  # type: ignore[no-any-return]


def _in_format(b: Builder, x: Value, memory_format: torch.memory_format | None) -> Value:
    """Ask for a layout where the program does; else the layout is nobody's business inside the graph."""
    if memory_format is torch.channels_last or memory_format is torch.channels_last_3d:
        return with_strides(b, x, channels_last_strides(x.shape))
    if memory_format is torch.contiguous_format:
        return with_strides(b, x, contiguous_strides(x.shape))
    return x


def _cast(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    """A conversion that stands in the program. One that autocast put there says so, and needs no rounding."""
    if dtype is x.dtype or dtype not in COMPUTE_DTYPE or "autocast" in b.meta:
        return x.to(dtype)
    return b.emit(prims.convert_element_type, x, dtype, True)  # type: ignore[no-any-return]


def like_strides(x: Any, memory_format: torch.memory_format | None) -> Sizes:
    """Strides of an `*_like` result; None means preserve_format."""
    shape = tuple(x.shape)
    if memory_format is None or memory_format is torch.preserve_format:
        return dense_like(shape, x.stride())
    return format_strides(shape, memory_format)


@OP.formula("clone")
def _clone(x: Any, *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    return TensorSpec(tuple(x.shape), like_strides(x, memory_format), x.dtype, x.device)


@OP.rule("clone")
def _lower_clone(b: Builder, x: Value, *, memory_format: torch.memory_format | None = None) -> Value:
    return _in_format(b, x, memory_format)


@OP.formula("contiguous")
def _contiguous(x: Any, *, memory_format: torch.memory_format = torch.contiguous_format) -> TensorSpec:
    return _clone(x, memory_format=memory_format)


@OP.rule("contiguous")
def _lower_contiguous(b: Builder, x: Value, *, memory_format: torch.memory_format = torch.contiguous_format) -> Value:
    return _in_format(b, x, memory_format)


@OP.formula("empty_like", "zeros_like", "ones_like")
def like(
    x: Any, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: torch.memory_format | None = None, generator: Any = None,
) -> TensorSpec:  # fmt: skip
    return TensorSpec(
        tuple(x.shape),
        like_strides(x, memory_format),
        dtype or x.dtype,
        x.device if device is None else resolved_device(device),
    )


@OP.formula("_to_copy")
def _to_copy(
    x: Any, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: torch.memory_format | None = None,
) -> TensorSpec:  # fmt: skip
    return like(x, dtype=dtype, device=device, memory_format=memory_format)


@OP.rule("_to_copy")
def _lower_to_copy(
    b: Builder,
    x: Value,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Value:
    if device is not None and resolved_device(device) != x.device:
        x = b.emit(prims.device_put, x, resolved_device(device))
    if dtype is not None:
        x = _cast(b, x, dtype)
    return _in_format(b, x, memory_format)


@OP.rule("_autocast_to_reduced_precision?", "_autocast_to_full_precision?")
def _lower_autocast(b: Builder, x: Value, cuda_enabled: bool, cpu_enabled: bool, *dtypes: torch.dtype) -> Value:
    enabled = cpu_enabled if x.device.type == "cpu" else cuda_enabled
    if not enabled or not x.dtype.is_floating_point:
        return x
    if not dtypes:
        return x.to(torch.float32)
    return x.to(dtypes[1] if x.device.type == "cpu" else dtypes[0])


@OP.formula("copy")
def _copy(x: Any, src: Any, non_blocking: bool = False) -> TensorSpec:
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


@OP.rule("copy")
def _lower_copy(b: Builder, x: Value, src: Value, non_blocking: bool = False) -> Value:
    if src.device != x.device:
        src = b.emit(prims.device_put, src, x.device)
    return _cast(b, src, x.dtype).expand(x.shape)


@OP.formula("zero")
def _zero(x: Any) -> TensorSpec:
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


@OP.rule("zero")
def _lower_zero(b: Builder, x: Value) -> Value:
    return b.full_like(x, 0)


def _made(b: Builder, size: Sequence[Any], value: Any, dtype: Any, device: Any) -> Value:
    return b.full(size, value, dtype or torch.get_default_dtype(), resolved_device(device))


def made(size: Sequence[Size], dtype: torch.dtype | None, device: Any, memory_format: Any = None) -> TensorSpec:
    shape: Sizes = tuple(size)
    if any(type(s) is int and s < 0 for s in shape):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(s for s in shape)}: {list(shape)}")
    strides = contiguous_strides(shape) if memory_format is None else format_strides(shape, memory_format)
    return TensorSpec(shape, strides, dtype or torch.get_default_dtype(), resolved_device(device))


@OP.formula("full")
def _full(
    size: Sequence[Size], value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> TensorSpec:
    return made(size, dtype or number_dtype(value), device)


@OP.refuses("full")
def _refuse_full(
    size: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> None:
    if dtype is None and type(value) is float:
        dtype = torch.get_default_dtype()
    filled(value, dtype or torch.int64, size, device)


@OP.rule("full")
def _lower_full(
    b: Builder,
    size: Sequence[Any],
    value: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return _made(b, size, value, dtype or number_dtype(value), device)


@OP.formula("empty.memory_format", "zeros", "ones", "_efficientzerotensor")
def _empty(
    size: Sequence[Size],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> TensorSpec:
    return made(size, dtype, device, memory_format)


@OP.rule("zeros", "empty.memory_format", "_efficientzerotensor")
def _lower_zeros(
    b: Builder,
    size: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Value:
    return _made(b, size, 0, dtype, device)


@OP.rule("ones")
def _lower_ones(
    b: Builder,
    size: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return _made(b, size, 1, dtype, device)


@OP.formula("scalar_tensor")
def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:
    return made((), dtype, device)


@OP.refuses("scalar_tensor")
def _refuse_scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> None:
    filled(value, dtype or torch.get_default_dtype(), (), device)


@OP.rule("scalar_tensor")
def _lower_scalar_tensor(
    b: Builder, value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Value:
    return _made(b, (), value, dtype, device)


def _filled_like(value: Any) -> Any:
    def rule(
        b: Builder,
        x: Value,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Value:
        return b.full(x.shape, value, dtype or x.dtype, x.device if device is None else resolved_device(device))

    return rule


OP.rule("zeros_like")(_filled_like(0))
OP.rule("ones_like")(_filled_like(1))
OP.rule("empty_like")(_filled_like(0))


@OP.formula("full_like")
def full_like(x: Any, value: Any, **options: Any) -> TensorSpec:
    return like(x, **options)


@OP.refuses("full_like")
def _refuse_full_like(
    x: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> None:
    filled(value, dtype or x.dtype, x.shape, device or x.device)


@OP.rule("full_like")
def _lower_full_like(b: Builder, x: Value, value: Any, **options: Any) -> Value:
    return _filled_like(value)(b, x, **options)  # type: ignore[no-any-return]


def _filled_new(value: Any) -> Any:
    def rule(
        b: Builder,
        x: Value,
        size: Sequence[Any],
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Value:
        return b.full(size, value, dtype or x.dtype, x.device if device is None else resolved_device(device))

    return rule


@OP.formula("new_empty", "new_zeros", "new_ones")
def _new(
    x: Any, size: Sequence[Size], *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> TensorSpec:
    return made(size, dtype or x.dtype, x.device if device is None else device)


OP.rule("new_zeros")(_filled_new(0))
OP.rule("new_ones")(_filled_new(1))
OP.rule("new_empty")(_filled_new(0))


@OP.formula("new_full")
def _new_full(x: Any, size: Sequence[Size], value: Any, **options: Any) -> TensorSpec:
    return _new(x, size, **options)


@OP.refuses("new_full")
def _refuse_new_full(
    x: Any, size: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> None:
    filled(value, dtype or x.dtype, size, device or x.device)


@OP.rule("new_full")
def _lower_new_full(b: Builder, x: Value, size: Sequence[Any], value: Any, **options: Any) -> Value:
    return _filled_new(value)(b, x, size, **options)  # type: ignore[no-any-return]


@OP.formula("empty_strided")
def _empty_strided(
    size: Sequence[Size],
    stride: Sequence[Size],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **options: Any,
) -> TensorSpec:
    return TensorSpec(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), resolved_device(device))


@OP.rule("empty_strided")
def _lower_empty_strided(
    b: Builder,
    size: Sequence[Any],
    stride: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return b.emit(  # type: ignore[no-any-return]
        prims.empty_strided,
        tuple(size),
        tuple(stride),  # type: ignore[no-any-return]
        dtype or torch.get_default_dtype(),
        resolved_device(device),
    )


@OP.formula("new_empty_strided")
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


@OP.rule("new_empty_strided")
def _lower_new_empty_strided(
    b: Builder,
    x: Value,
    size: Sequence[Any],
    stride: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return _lower_empty_strided(b, size, stride, dtype=dtype or x.dtype, device=device or x.device)  # type: ignore[no-any-return]


@OP.formula("empty_permuted")
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


@OP.refuses("empty_permuted")
def _refuse_empty_permuted(size: Sequence[Any], physical_layout: Sequence[int], **options: Any) -> None:
    refuse(len(size) != len(physical_layout), "Number of dimensions in size does not match the physical_layout")
    refuse(
        any(not 0 <= d < len(size) for d in physical_layout),
        lambda: f"Dimension out of range in {list(physical_layout)}",
    )
    refuse(len(set(physical_layout)) != len(size), "Duplicate dim not allowed")


@OP.rule("empty_permuted")
def _lower_empty_permuted(
    b: Builder,
    size: Sequence[Any],
    physical_layout: Sequence[int],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    strides = strides_in_order(tuple(size), physical_layout[::-1])
    return _lower_empty_strided(b, size, strides, dtype=dtype, device=device)  # type: ignore[no-any-return]


def _count(start: Any, end: Any, step: Any) -> Any:
    if all(isinstance(v, (int, torch.SymInt)) for v in (start, end, step)):
        return (end - start + step - 1) // step if step > 0 else (start - end - step - 1) // -step
    return math.ceil((end - start) / step)


@OP.formula("arange.start_step")
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
    return made((length,), dtype, device)


@OP.refuses("arange", "arange.start", "arange.start_step")
def _refuse_arange(*given: Any, step: Any = 1, **options: Any) -> None:
    ends = (0, *given) if len(given) == 1 else given
    start, end, step = ends if len(ends) == 3 else (*ends, step)
    finite = all(not isinstance(v, float) or math.isfinite(v) for v in (start, end))
    refuse(not finite, lambda: f"unsupported range: {start} -> {end}")
    refuse(not isinstance(step, torch.SymInt) and step == 0, "step must be nonzero")


@OP.formula("arange")
def _arange(end: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:
    return _arange_step(0, end, 1, dtype=dtype, device=device)


@OP.formula("arange.start")
def _arange_start(
    start: Any, end: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> TensorSpec:
    return _arange_step(start, end, 1, dtype=dtype, device=device)


@OP.rule("arange", "arange.start", "arange.start_step")
def _lower_arange(
    b: Builder, *ends: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Value:
    start, end, step = (0, ends[0], 1) if len(ends) == 1 else (*ends, 1) if len(ends) == 2 else ends
    integral = all(isinstance(v, (int, torch.SymInt)) for v in (start, end, step))
    dtype = dtype or (torch.int64 if integral else torch.get_default_dtype())
    length, place = _count(start, end, step), resolved_device(device)
    if not integral and not dtype.is_floating_point:
        start, end, step = int(start), int(end), int(step)
        integral = True
        if dtype is torch.int64:  # the other integers have as many elements as the uncut numbers give
            length = _count(start, end, step)
    if integral:
        return b.iota(length, place, start, step).to(dtype)
    return (b.iota(length, place).to(torch.float64) * float(step) + float(start)).to(dtype)


@OP.rule("range", "range.step")
def _lower_range(
    b: Builder,
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    """start, start + step, ..., with the end."""
    count = math.floor((end - start) / step) + 1
    dtype = dtype or torch.get_default_dtype()
    index = b.iota(count, resolved_device(device))
    if not dtype.is_floating_point:
        return (index * int(step) + int(start)).to(dtype)
    return (index.to(torch.float64) * float(step) + float(start)).to(dtype)


def _end(value: Any, dtype: torch.dtype, work: torch.dtype) -> Any:
    """An end of a range as eager has it: for integers it is cut first."""
    if dtype.is_floating_point or dtype.is_complex:
        return value.to(work) if isinstance(value, Value) else value
    return value.to(torch.int64).to(work) if isinstance(value, Value) else int(value)


@OP.formula(
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
    return made((steps,), dtype, device)


@OP.refuses(*(f"{name}.{kind}" for name in ("linspace", "logspace")
       for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")))  # fmt: skip
def _refuse_range_ends(start: Any, end: Any, steps: Any, *args: Any, **options: Any) -> None:
    ranks = [v.dim() for v in (start, end) if isinstance(v, TENSORS)]
    refuse(any(ranks), lambda: f"only supports 0-dimensional start and end tensors, but got {ranks} dimension(s)")


@OP.rule("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
def lower_linspace(
    b: Builder,
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    complex_ends = any(isinstance(v, complex) or (isinstance(v, Value) and v.dtype.is_complex) for v in (start, end))
    dtype = dtype or (torch.complex64 if complex_ends else torch.get_default_dtype())
    work = torch.complex128 if dtype.is_complex else torch.float64
    start, end = (_end(v, dtype, work) for v in (start, end))
    index = b.iota(steps, resolved_device(device))
    if isinstance(steps, int) and steps == 1:
        return (
            start.reshape((1,)).to(dtype)
            if isinstance(start, Value)
            else b.full((1,), start, dtype, resolved_device(device))
        )
    step = (end - start) / (steps - 1) if not (isinstance(steps, int) and steps == 0) else 0.0
    up = index.to(work) * step + start
    down = ((steps - 1) - index).to(work) * -step + end
    return b.where(index < steps // 2, up, down).to(dtype)


@OP.rule("logspace", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor")
def _lower_logspace(
    b: Builder,
    start: Any,
    end: Any,
    steps: Any,
    base: float = 10.0,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    dtype = dtype or torch.get_default_dtype()
    work = torch.complex128 if dtype.is_complex else torch.float64
    if not same_size(steps, 1):
        start, end = (_end(v, dtype, work) for v in (start, end))
    exponents = lower_linspace(b, start, end, steps, dtype=work, device=device)
    return b.binary(prims.pow, float(base), exponents).to(dtype)


@OP.formula("eye")
def _eye(n: Size, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:
    return made((n, n), dtype, device)


@OP.formula("eye.m")
def _eye_m(n: Size, m: Size, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> TensorSpec:
    return made((n, m), dtype, device)


@OP.rule("eye", "eye.m")
def _lower_eye(
    b: Builder,
    n: Any,
    m: Any = None,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    m = n if m is None else m
    rows, columns = b.iota(n, resolved_device(device)).unsqueeze(1), b.iota(m, resolved_device(device)).unsqueeze(0)
    return rows.eq(columns).to(dtype or torch.get_default_dtype())


def triangle(b: Builder, rows: Any, columns: Any, diagonal: Any, device: torch.device) -> Value:
    """(rows, columns) bool: true at and below the given diagonal."""
    i, j = b.iota(rows, device).unsqueeze(1), b.iota(columns, device).unsqueeze(0)
    return j <= i + diagonal  # type: ignore[no-any-return]


@OP.formula("tril", "triu")
def _tril(x: Any, diagonal: int = 0) -> TensorSpec:
    if x.dim() < 2:
        raise RuntimeError("tril: input tensor must have at least 2 dimensions")
    return contiguous(x, x.shape)


@OP.rule("tril")
def _lower_tril(b: Builder, x: Value, diagonal: Any = 0) -> Value:
    return b.where(triangle(b, x.shape[-2], x.shape[-1], diagonal, x.device), x, 0)


@OP.rule("triu")
def _lower_triu(b: Builder, x: Value, diagonal: Any = 0) -> Value:
    return b.where(triangle(b, x.shape[-2], x.shape[-1], diagonal - 1, x.device), b.full((), 0, x.dtype, x.device), x)


def _triangle_indices(lower: bool) -> Callable[..., Value]:
    def rule(
        b: Builder,
        rows: int,
        columns: int,
        offset: int = 0,
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Value:
        place = resolved_device(device)
        kind = dtype or torch.int64

        def span(i: int) -> tuple[int, int]:
            edge = min(max(i + offset + (1 if lower else 0), 0), columns)
            return (0, edge) if lower else (edge, columns)

        total = sum(span(i)[1] - span(i)[0] for i in range(rows))
        i = b.iota(rows, place)
        edge = (i + (offset + (1 if lower else 0))).maximum(0).minimum(columns)
        lengths = edge if lower else columns - edge
        ends = b.emit(prims.cumsum, lengths, 0)
        k = b.iota(total, place)
        if total == 0:
            return b.full((2, 0), 0, kind, place)
        row = b.emit(prims.searchsorted, ends, k, True)
        start = b.emit(prims.index, ends - lengths, (row,), False)
        column = k - start
        if not lower:
            column = column + b.emit(prims.index, edge, (row,), False)
        return b.cat([row.unsqueeze(0), column.unsqueeze(0)], 0).to(kind)

    return rule


@OP.formula("tril_indices")
def _tril_indices(
    row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = torch.int64, device: Any = None, **options: Any
) -> TensorSpec:
    lengths = [min(max(r + offset + 1, 0), col) for r in range(row)]
    return made((2, sum(lengths)), dtype or torch.int64, device)


OP.rule("tril_indices")(_triangle_indices(True))


@OP.formula("triu_indices")
def _triu_indices(
    row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = torch.int64, device: Any = None, **options: Any
) -> TensorSpec:
    lengths = [col - min(max(r + offset, 0), col) for r in range(row)]
    return made((2, sum(lengths)), dtype or torch.int64, device)


OP.rule("triu_indices")(_triangle_indices(False))


# --- without a rule of their own ------------------------------------------------------------------


@OP.formula("resize_")
def _resize(x: Any, size: Sequence[Size], *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    return TensorSpec(
        tuple(size), format_strides(tuple(size), memory_format or torch.contiguous_format), x.dtype, x.device
    )


@OP.formula("resize_as_")
def _resize_as(x: Any, template: Any, *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    strides = like_strides(template, memory_format)
    return TensorSpec(tuple(template.shape), strides, x.dtype, x.device)


@OP.formula("set_.source_Tensor")
def _set_tensor(x: Any, source: Any) -> TensorSpec:
    return TensorSpec(tuple(source.shape), source.stride(), x.dtype, x.device, source.storage_offset())


@OP.formula("set_.source_Tensor_storage_offset", "set_.source_Storage_storage_offset")
def _set_storage(x: Any, source: Any, offset: Size, size: Sequence[Size], stride: Sequence[Size] = ()) -> TensorSpec:
    shape = tuple(size)
    return TensorSpec(shape, tuple(stride) or contiguous_strides(shape), x.dtype, x.device, offset)
