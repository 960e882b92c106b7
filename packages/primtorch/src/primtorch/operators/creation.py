"""Tensors made from sizes or like another tensor, copies and conversions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Unpack

import torch

from primtorch import prims
from primtorch.arguments import NUMBERS, TENSORS, Device, LikeOptions, Number, Real, Sizes, TensorLike, TensorOptions
from primtorch.builder import Builder, Value, same_size
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Rule, Trait
from primtorch.layout import channels_last_strides, contiguous_strides, dense_like, format_strides, strides_in_order
from primtorch.operators.build import contiguous
from primtorch.operators.elementwise import filled
from primtorch.operators.refusals import refuse
from primtorch.placement import resolved_device
from primtorch.promotion import COMPUTE_DTYPE, number_dtype
from primtorch.samples import after, call, reals
from primtorch.spec import Size, TensorSpec

OP = Family("creation")
OP.trait(Trait.ANYWHERE, "_copy_from _to_copy copy copy_ resize_as_")
OP.trait(Trait.TO_FIRST, "copy")
OP.trait(Trait.CONVERTS_OUT, "arange copy empty eye full linspace logspace ones range zeros")
OP.trait(Trait.DTYPE_OF_OUT, "arange empty eye full linspace logspace ones range zeros")
OP.trait(Trait.OVERLAPS, "empty eye full ones tril triu zero zeros")
_WHOLE = (int, torch.SymInt)


def with_strides(b: Builder, x: Value, strides: Sequence[Size]) -> Value:
    """x with given strides; a size-1 dimension's stride means nothing but is kept as asked."""
    if tuple(x.spec.strides) == tuple(strides):
        return x
    return b.emit(prims.copy_strided, x, tuple(strides))


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
    return b.emit(prims.convert_element_type, x, dtype, True)


def like_strides(x: TensorLike, memory_format: torch.memory_format | None) -> Sizes:
    """Strides of an `*_like` result; None means preserve_format."""
    shape = tuple(x.shape)
    if memory_format is None or memory_format is torch.preserve_format:
        return dense_like(shape, x.stride())
    return format_strides(shape, memory_format)


@OP.formula("clone")
def _clone(x: TensorLike, *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    return TensorSpec(tuple(x.shape), like_strides(x, memory_format), x.dtype, x.device)


@OP.rule("clone")
def _lower_clone(b: Builder, x: Value, *, memory_format: torch.memory_format | None = None) -> Value:
    return _in_format(b, x, memory_format)


@OP.formula("contiguous")
def _contiguous(x: TensorLike, *, memory_format: torch.memory_format = torch.contiguous_format) -> TensorSpec:
    return _clone(x, memory_format=memory_format)


@OP.rule("contiguous")
def _lower_contiguous(b: Builder, x: Value, *, memory_format: torch.memory_format = torch.contiguous_format) -> Value:
    return _in_format(b, x, memory_format)


@OP.formula("empty_like", "zeros_like", "ones_like")
def like(
    x: TensorLike,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
    memory_format: torch.memory_format | None = None,
    **options: object,
) -> TensorSpec:
    """A tensor of x's sizes, in the memory format that is asked for, or x's own."""
    return TensorSpec(
        tuple(x.shape),
        like_strides(x, memory_format),
        dtype or x.dtype,
        x.device if device is None else resolved_device(device),
    )


@OP.formula("_to_copy")
def _to_copy(x: TensorLike | Number, *, non_blocking: bool = False, **options: Unpack[LikeOptions]) -> TensorSpec:
    if isinstance(x, NUMBERS):  # `vmap` converts an operand that is a number, as the 0-d tensor that torch makes of it
        x = TensorSpec((), (), number_dtype(x), torch.device("cpu"))
    made = like(x, **options)
    _refuse_without_data(x, made)
    return made


def _refuse_without_data(source: TensorLike, target: TensorLike) -> None:
    nothing = source.device.type == "meta" != target.device.type
    refuse(nothing, "Cannot copy out of meta tensor; no data!", NotImplementedError)


@OP.rule("_to_copy")
def _lower_to_copy(
    b: Builder, x: Value | Number, *, non_blocking: bool = False, **options: Unpack[LikeOptions]
) -> Value:
    if isinstance(x, NUMBERS):
        return b.full((), x, options.get("dtype") or number_dtype(x), resolved_device(options.get("device")))
    dtype, device = made_like(x, options)
    if device != x.device:
        x = b.emit(prims.device_put, x, device)
    if options.get("dtype") is not None:
        x = _cast(b, x, dtype)
    return _in_format(b, x, options.get("memory_format"))


@OP.rule("_autocast_to_reduced_precision?", "_autocast_to_full_precision?")
def _lower_autocast(b: Builder, x: Value, cuda_enabled: bool, cpu_enabled: bool, *dtypes: torch.dtype) -> Value:
    second = Fact.AUTOCASTS_TO_SECOND_DTYPE.on(x.device)
    enabled = cpu_enabled if second else cuda_enabled
    if not enabled or not x.dtype.is_floating_point:
        return x
    if not dtypes:
        return x.to(torch.float32)
    return x.to(dtypes[1] if second else dtypes[0])


@OP.formula("copy")
def _copy(x: TensorLike, src: TensorLike, non_blocking: bool = False) -> TensorSpec:
    _refuse_without_data(src, x)
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


@OP.rule("copy")
def _lower_copy(b: Builder, x: Value, src: Value, non_blocking: bool = False) -> Value:
    if src.device != x.device:
        src = b.emit(prims.device_put, src, x.device)
    return _cast(b, src, x.dtype).expand(x.shape)


@OP.formula("zero")
def _zero(x: TensorLike) -> TensorSpec:
    shape = tuple(x.shape)
    return TensorSpec(shape, dense_like(shape, x.stride()), x.dtype, x.device)


@OP.rule("zero")
def _lower_zero(b: Builder, x: Value) -> Value:
    return b.full_like(x, 0)


def made_by(options: TensorOptions) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of what a factory makes."""
    return options.get("dtype") or torch.get_default_dtype(), resolved_device(options.get("device"))


def made(
    size: Sequence[Size],
    dtype: torch.dtype | None,
    device: Device,
    memory_format: torch.memory_format | None = None,
) -> TensorSpec:
    """A new tensor of these sizes. Raises RuntimeError for a negative one."""
    shape: Sizes = tuple(size)
    if any(type(s) is int and s < 0 for s in shape):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(s for s in shape)}: {list(shape)}")
    strides = contiguous_strides(shape) if memory_format is None else format_strides(shape, memory_format)
    return TensorSpec(shape, strides, dtype or torch.get_default_dtype(), resolved_device(device))


@OP.formula("full")
def _full(size: Sequence[Size], value: Number, **options: Unpack[TensorOptions]) -> TensorSpec:
    return made(size, options.get("dtype") or number_dtype(value), options.get("device"))


@OP.refuses("full")
def _refuse_full(size: Sequence[Size], value: Number, **options: Unpack[TensorOptions]) -> None:
    assumed = torch.get_default_dtype() if type(value) is float else torch.int64
    filled(value, options.get("dtype") or assumed, size, options.get("device"))


@OP.rule("full")
def _lower_full(
    b: Builder,
    size: Sequence[Size],
    value: Number,
    **options: Unpack[TensorOptions],
) -> Value:
    return b.full(size, value, options.get("dtype") or number_dtype(value), resolved_device(options.get("device")))


@OP.formula("empty.memory_format", "zeros", "ones", "_efficientzerotensor")
def _empty(
    size: Sequence[Size],
    **options: Unpack[LikeOptions],
) -> TensorSpec:
    return made(size, options.get("dtype"), options.get("device"), options.get("memory_format"))


@OP.rule("zeros", "empty.memory_format", "_efficientzerotensor")
def _lower_zeros(
    b: Builder,
    size: Sequence[Size],
    **options: Unpack[LikeOptions],
) -> Value:
    return b.full(size, 0, *made_by(options))


@OP.rule("ones")
def _lower_ones(
    b: Builder,
    size: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> Value:
    return b.full(size, 1, *made_by(options))


@OP.formula("scalar_tensor")
def _scalar_tensor(value: Number, **options: Unpack[TensorOptions]) -> TensorSpec:
    return made((), options.get("dtype"), options.get("device"))


@OP.refuses("scalar_tensor")
def _refuse_scalar_tensor(value: Number, **options: Unpack[TensorOptions]) -> None:
    filled(value, options.get("dtype") or torch.get_default_dtype(), (), options.get("device"))


@OP.rule("scalar_tensor")
def _lower_scalar_tensor(b: Builder, value: Number, **options: Unpack[TensorOptions]) -> Value:
    return b.full((), value, *made_by(options))


def made_like(x: Value, options: TensorOptions) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of what a factory makes that takes from a tensor what it is not given."""
    device = options.get("device")
    return options.get("dtype") or x.dtype, x.device if device is None else resolved_device(device)


def _filled_like(value: Number) -> Rule:
    def rule(
        b: Builder,
        x: Value,
        **options: Unpack[LikeOptions],
    ) -> Value:
        return b.full(x.shape, value, *made_like(x, options))

    return rule


OP.rule("zeros_like")(_filled_like(0))
OP.rule("ones_like")(_filled_like(1))
OP.rule("empty_like")(_filled_like(0))


@OP.formula("full_like")
def full_like(x: TensorLike, value: Number, **options: Unpack[LikeOptions]) -> TensorSpec:
    """As `like`, whatever the value."""
    return like(x, **options)


@OP.refuses("full_like")
def _refuse_full_like(x: TensorLike, value: Number, **options: Unpack[LikeOptions]) -> None:
    filled(value, options.get("dtype") or x.dtype, x.shape, options.get("device") or x.device)


@OP.rule("full_like")
def _lower_full_like(b: Builder, x: Value, value: Number, **options: Unpack[LikeOptions]) -> Value:
    return b.full(x.shape, value, *made_like(x, options))


def _filled_new(value: Number) -> Rule:
    def rule(
        b: Builder,
        x: Value,
        size: Sequence[Size],
        **options: Unpack[TensorOptions],
    ) -> Value:
        return b.full(size, value, *made_like(x, options))

    return rule


@OP.formula("new_empty", "new_zeros", "new_ones")
def _new(x: TensorLike, size: Sequence[Size], **options: Unpack[TensorOptions]) -> TensorSpec:
    device = options.get("device")
    return made(size, options.get("dtype") or x.dtype, x.device if device is None else device)


OP.rule("new_zeros")(_filled_new(0))
OP.rule("new_ones")(_filled_new(1))
OP.rule("new_empty")(_filled_new(0))


@OP.formula("_new_zeros_with_same_feature_meta")
def _new_tangent(x: TensorLike, other: TensorLike, *, self_num_batch_dims: int = 0) -> TensorSpec:
    """Laid out like `other`, behind x's first dimensions."""
    reach: Size = 1
    for size, stride in zip(other.shape, other.stride(), strict=True):
        reach = reach + (size - 1) * stride
    batch = tuple(x.shape[:self_num_batch_dims])
    strides = (*(step * reach for step in contiguous_strides(batch)), *other.stride())
    return TensorSpec((*batch, *other.shape), strides, other.dtype, torch.device(other.device))


@OP.rule("_new_zeros_with_same_feature_meta")
def _lower_new_tangent(b: Builder, x: Value, other: Value, *, self_num_batch_dims: int = 0) -> Value:
    return b.full((*x.shape[:self_num_batch_dims], *other.shape), 0, other.dtype, other.device)


@OP.formula("new_full")
def _new_full(x: TensorLike, size: Sequence[Size], value: Number, **options: Unpack[TensorOptions]) -> TensorSpec:
    return _new(x, size, **options)


@OP.refuses("new_full")
def _refuse_new_full(x: TensorLike, size: Sequence[Size], value: Number, **options: Unpack[TensorOptions]) -> None:
    filled(value, options.get("dtype") or x.dtype, size, options.get("device") or x.device)


@OP.rule("new_full")
def _lower_new_full(
    b: Builder, x: Value, size: Sequence[Size], value: Number, **options: Unpack[TensorOptions]
) -> Value:
    return b.full(size, value, *made_like(x, options))


@OP.formula("empty_strided")
def _empty_strided(
    size: Sequence[Size],
    stride: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> TensorSpec:
    return TensorSpec(tuple(size), tuple(stride), *made_by(options))


@OP.refuses("empty_strided")
def _refuse_empty_strided(size: Sequence[Size], stride: Sequence[Size], **options: object) -> None:
    refuse(len(size) != len(stride), "dimensionality of sizes must match dimensionality of strides")
    refuse(any(n < 0 for n in (*size, *stride)), lambda: f"negative sizes or strides: {list(size)}, {list(stride)}")


@OP.rule("empty_strided")
def _lower_empty_strided(
    b: Builder,
    size: Sequence[Size],
    stride: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> Value:
    return b.emit(prims.empty_strided, tuple(size), tuple(stride), *made_by(options))


@OP.formula("new_empty_strided")
def _new_empty_strided(
    x: TensorLike,
    size: Sequence[Size],
    stride: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> TensorSpec:
    device = options.get("device")
    place = x.device if device is None else resolved_device(device)
    return TensorSpec(tuple(size), tuple(stride), options.get("dtype") or x.dtype, place)


@OP.refuses("new_empty_strided")
def _refuse_new_empty_strided(x: TensorLike, size: Sequence[Size], stride: Sequence[Size], **options: object) -> None:
    _refuse_empty_strided(size, stride)


@OP.rule("new_empty_strided")
def _lower_new_empty_strided(
    b: Builder,
    x: Value,
    size: Sequence[Size],
    stride: Sequence[Size],
    **options: Unpack[TensorOptions],
) -> Value:
    return b.emit(prims.empty_strided, tuple(size), tuple(stride), *made_like(x, options))


@OP.formula("empty_permuted")
def _empty_permuted(
    size: Sequence[Size],
    physical_layout: Sequence[int],
    **options: Unpack[TensorOptions],
) -> TensorSpec:
    strides: list[Size] = [0] * len(size)
    step: Size = 1
    for dim in reversed(physical_layout):
        strides[dim] = step
        step = step * size[dim]
    return TensorSpec(tuple(size), tuple(strides), *made_by(options))


@OP.refuses("empty_permuted")
def _refuse_empty_permuted(size: Sequence[Size], physical_layout: Sequence[int], **options: object) -> None:
    refuse(any(n < 0 for n in size), lambda: f"Trying to create tensor with negative dimension: {list(size)}")
    refuse(len(size) != len(physical_layout), "Number of dimensions in size does not match the physical_layout")
    refuse(
        any(not 0 <= d < len(size) for d in physical_layout),
        lambda: f"Dimension out of range in {list(physical_layout)}",
    )
    refuse(len(set(physical_layout)) != len(size), "Duplicate dim not allowed")


@OP.rule("empty_permuted")
def _lower_empty_permuted(
    b: Builder,
    size: Sequence[Size],
    physical_layout: Sequence[int],
    **options: Unpack[TensorOptions],
) -> Value:
    strides = strides_in_order(tuple(size), physical_layout[::-1])
    return b.emit(prims.empty_strided, tuple(size), strides, *made_by(options))


def _whole_count(start: Size, end: Size, step: Size) -> Size:
    return (end - start + step - 1) // step if step > 0 else (start - end - step - 1) // -step


def _steps(start: Real, end: Real, step: Real) -> float:
    return (end - start) / step  # type: ignore[operator]  # torch does not say that symbols and floats subtract


@OP.formula("arange.start_step")
def _arange_step(start: Real, end: Real, step: Real = 1, **options: Unpack[TensorOptions]) -> TensorSpec:
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (step > 0 and start > end) or (step < 0 and start < end):
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    length: Size
    if isinstance(start, _WHOLE) and isinstance(end, _WHOLE) and isinstance(step, _WHOLE):
        length, assumed = _whole_count(start, end, step), torch.int64
    elif options.get("dtype") is torch.int64:  # the other integers have as many elements as the uncut numbers give
        length, assumed = _whole_count(int(start), int(end), int(step)), torch.int64
    else:
        length, assumed = -int((float(start) - float(end)) // float(step)), torch.get_default_dtype()
    return made((length,), options.get("dtype") or assumed, options.get("device"))


@OP.refuses("arange", "arange.start", "arange.start_step")
def _refuse_arange(*given: Real, step: Real = 1, **options: object) -> None:
    ends = (0, *given) if len(given) == 1 else given
    start, end, by = ends if len(ends) == 3 else (*ends, step)
    finite = all(not isinstance(v, float) or math.isfinite(v) for v in (start, end))
    refuse(not finite, lambda: f"unsupported range: {start} -> {end}")
    refuse(not isinstance(by, torch.SymInt) and by == 0, "step must be nonzero")


@OP.formula("arange")
def _arange(end: Real, **options: Unpack[TensorOptions]) -> TensorSpec:
    return _arange_step(0, end, 1, **options)


@OP.formula("arange.start")
def _arange_start(start: Real, end: Real, **options: Unpack[TensorOptions]) -> TensorSpec:
    return _arange_step(start, end, 1, **options)


@OP.rule("arange", "arange.start", "arange.start_step")
def _lower_arange(b: Builder, *ends: Real, **options: Unpack[TensorOptions]) -> Value:
    start, end, step = (0, ends[0], 1) if len(ends) == 1 else (*ends, 1) if len(ends) == 2 else ends
    dtype, place = options.get("dtype"), resolved_device(options.get("device"))
    if isinstance(start, _WHOLE) and isinstance(end, _WHOLE) and isinstance(step, _WHOLE):
        return b.iota(_whole_count(start, end, step), place, start, step).to(dtype or torch.int64)
    dtype = dtype or torch.get_default_dtype()
    length = math.ceil(_steps(start, end, step))
    if dtype.is_floating_point:
        return (b.iota(length, place).to(torch.float64) * float(step) + float(start)).to(dtype)
    first, stop, by = int(start), int(end), int(step)
    if dtype is torch.int64:  # the other integers have as many elements as the uncut numbers give
        return b.iota(_whole_count(first, stop, by), place, first, by)
    return b.iota(length, place, first, by).to(dtype)


@OP.rule("range", "range.step")
def _lower_range(
    b: Builder,
    start: Real,
    end: Real,
    step: Real = 1,
    **options: Unpack[TensorOptions],
) -> Value:
    """start, start + step, ..., with the end."""
    count = math.floor(_steps(start, end, step)) + 1
    dtype, place = made_by(options)
    index = b.iota(count, place)
    if not dtype.is_floating_point:
        return (index * int(step) + int(start)).to(dtype)
    return (index.to(torch.float64) * float(step) + float(start)).to(dtype)


def _end(b: Builder, value: Value | float, dtype: torch.dtype, work: torch.dtype, place: torch.device) -> Value | float:
    """An end of a range as eager has it, where the range is made: for integers it is cut first."""
    if isinstance(value, Value) and value.device != place:
        value = b.emit(prims.device_put, value, place)
    if dtype.is_floating_point or dtype.is_complex:
        return value.to(work) if isinstance(value, Value) else value
    return value.to(torch.int64).to(work) if isinstance(value, Value) else int(value)


@OP.formula(
    "linspace linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor logspace "
    "logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor"
)
def _linspace(
    start: TensorLike | Number,
    end: TensorLike | Number,
    steps: Size,
    base: float = 10.0,
    **options: Unpack[TensorOptions],
) -> TensorSpec:
    dtype = options.get("dtype")
    if dtype is None and any(isinstance(v, complex) for v in (start, end)):
        dtype = number_dtype(1j)
    return made((steps,), dtype, options.get("device"))


@OP.refuses(*(f"{name}.{kind}" for name in ("linspace", "logspace")
       for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")))  # fmt: skip
def _refuse_range_ends(start: TensorLike | Number, end: TensorLike | Number, *args: object, **options: object) -> None:
    ranks = [v.dim() for v in (start, end) if isinstance(v, TENSORS)]
    refuse(any(ranks), lambda: f"only supports 0-dimensional start and end tensors, but got {ranks} dimension(s)")


@OP.rule("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
def lower_linspace(
    b: Builder, start: Value | float, end: Value | float, steps: Size, **options: Unpack[TensorOptions]
) -> Value:
    """`steps` numbers from start to end, the second half counted from the end; computed in float64."""
    complex_ends = any(isinstance(v, complex) or (isinstance(v, Value) and v.dtype.is_complex) for v in (start, end))
    dtype = options.get("dtype") or (torch.complex64 if complex_ends else torch.get_default_dtype())
    place = resolved_device(options.get("device"))
    work = torch.complex128 if dtype.is_complex else torch.float64
    start, end = (_end(b, v, dtype, work, place) for v in (start, end))
    index = b.iota(steps, place)
    if isinstance(steps, int) and steps == 1:
        return start.reshape((1,)).to(dtype) if isinstance(start, Value) else b.full((1,), start, dtype, place)
    step = (end - start) / (steps - 1) if not (isinstance(steps, int) and steps == 0) else 0.0
    up = index.to(work) * step + start
    down = ((steps - 1) - index).to(work) * -step + end
    return b.where(index < steps // 2, up, down).to(dtype)


@OP.rule("logspace", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor")
def _lower_logspace(
    b: Builder,
    start: Value | float,
    end: Value | float,
    steps: Size,
    base: float = 10.0,
    **options: Unpack[TensorOptions],
) -> Value:
    dtype, place = made_by(options)
    work = torch.complex128 if dtype.is_complex else torch.float64
    if not same_size(steps, 1):
        start, end = (_end(b, v, dtype, work, place) for v in (start, end))
    exponents = lower_linspace(b, start, end, steps, dtype=work, device=place)
    return b.binary(prims.pow, float(base), exponents).to(dtype)


@OP.formula("eye")
def _eye(n: Size, **options: Unpack[TensorOptions]) -> TensorSpec:
    return _eye_m(n, n, **options)


@OP.formula("eye.m")
def _eye_m(n: Size, m: Size, **options: Unpack[TensorOptions]) -> TensorSpec:
    return made((n, m), options.get("dtype"), options.get("device"))


@OP.rule("eye", "eye.m")
def _lower_eye(
    b: Builder,
    n: Size,
    m: Size | None = None,
    **options: Unpack[TensorOptions],
) -> Value:
    dtype, place = made_by(options)
    rows, columns = b.iota(n, place).unsqueeze(1), b.iota(n if m is None else m, place).unsqueeze(0)
    return rows.eq(columns).to(dtype)


def triangle(b: Builder, rows: Size, columns: Size, diagonal: Size, device: torch.device) -> Value:
    """(rows, columns) bool: true at and below the given diagonal."""
    i, j = b.iota(rows, device).unsqueeze(1), b.iota(columns, device).unsqueeze(0)
    return j <= i + diagonal


@OP.formula("tril", "triu")
def _tril(x: TensorLike, diagonal: int = 0) -> TensorSpec:
    if x.dim() < 2:
        raise RuntimeError("tril: input tensor must have at least 2 dimensions")
    return contiguous(x, x.shape)


@OP.rule("tril")
def _lower_tril(b: Builder, x: Value, diagonal: Size = 0) -> Value:
    return b.where(triangle(b, x.shape[-2], x.shape[-1], diagonal, x.device), x, 0)


@OP.rule("triu")
def _lower_triu(b: Builder, x: Value, diagonal: Size = 0) -> Value:
    return b.where(triangle(b, x.shape[-2], x.shape[-1], diagonal - 1, x.device), b.full((), 0, x.dtype, x.device), x)


def _triangle_indices(lower: bool) -> Callable[..., Value]:
    def rule(
        b: Builder,
        rows: int,
        columns: int,
        offset: int = 0,
        **options: Unpack[TensorOptions],
    ) -> Value:
        place = resolved_device(options.get("device"))
        kind = options.get("dtype") or torch.int64

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


@OP.refuses("tril_indices", "triu_indices")
def _refuse_triangle(row: int, col: int, offset: int = 0, **options: object) -> None:
    refuse(row < 0, lambda: f"row must be non-negative, got {row}")
    refuse(col < 0, lambda: f"col must be non-negative, got {col}")


@OP.formula("tril_indices")
def _tril_indices(row: int, col: int, offset: int = 0, **options: Unpack[TensorOptions]) -> TensorSpec:
    lengths = [min(max(r + offset + 1, 0), col) for r in range(row)]
    return made((2, sum(lengths)), options.get("dtype") or torch.int64, options.get("device"))


OP.rule("tril_indices")(_triangle_indices(True))


@OP.formula("triu_indices")
def _triu_indices(row: int, col: int, offset: int = 0, **options: Unpack[TensorOptions]) -> TensorSpec:
    lengths = [col - min(max(r + offset, 0), col) for r in range(row)]
    return made((2, sum(lengths)), options.get("dtype") or torch.int64, options.get("device"))


OP.rule("triu_indices")(_triangle_indices(False))


# --- without a rule of their own ------------------------------------------------------------------


@OP.formula("resize_")
def _resize(x: TensorLike, size: Sequence[Size], *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    return TensorSpec(
        tuple(size), format_strides(tuple(size), memory_format or torch.contiguous_format), x.dtype, x.device
    )


@OP.formula("resize_as_")
def _resize_as(x: TensorLike, template: TensorLike, *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    strides = like_strides(template, memory_format)
    return TensorSpec(tuple(template.shape), strides, x.dtype, x.device)


@OP.formula("set_.source_Tensor")
def _set_tensor(x: TensorLike, source: TensorLike) -> TensorSpec:
    return TensorSpec(tuple(source.shape), source.stride(), x.dtype, x.device, source.storage_offset())


@OP.formula("set_.source_Tensor_storage_offset", "set_.source_Storage_storage_offset")
def _set_storage(
    x: TensorLike, source: object, offset: Size, size: Sequence[Size], stride: Sequence[Size] = ()
) -> TensorSpec:
    shape = tuple(size)
    return TensorSpec(shape, tuple(stride) or contiguous_strides(shape), x.dtype, x.device, offset)


# --- samples ---------------------------------------------------------------------------------------

OP.samples("zeros ones empty.memory_format _efficientzerotensor", call([2, 3]), call([2, 0], dtype=torch.int64))
OP.samples("full", call([2, 3], 1.5), call([], True))
OP.samples("new_zeros new_ones new_empty", call(reals(4), [2, 3]))
OP.samples("_new_zeros_with_same_feature_meta", call(reals(4), reals(2, 3), self_num_batch_dims=1))
OP.samples("new_full", call(reals(4), [2, 3], 2))
OP.samples("empty_permuted", call([2, 3, 4], [2, 0, 1]))
OP.samples("empty_strided", call([2, 3], [1, 2]))
OP.samples("new_empty_strided", call(reals(4), [2, 3], [1, 2]))
OP.samples("eye", call(3))
OP.samples("eye.m", call(3, 4))
OP.samples("linspace logspace", call(1, 2.5, 5))
OP.samples("linspace.Scalar_Tensor logspace.Scalar_Tensor", call(1, reals(), 5))
OP.samples("linspace.Tensor_Scalar logspace.Tensor_Scalar", call(reals(), 2, 5))
OP.samples("linspace.Tensor_Tensor logspace.Tensor_Tensor", call(reals(), reals(), 5))
OP.samples("tril_indices triu_indices", call(3, 4, 1))
OP.samples("resize_", call(reals(3, 4), [2, 6]))
OP.samples("set_.source_Tensor_storage_offset", call(reals(3), reals(12), 1, [2, 3], [3, 1]))
OP.samples(
    "set_.source_Storage_storage_offset",
    call(reals(3), after(torch.Tensor.untyped_storage, reals(12)), 1, [2, 3], [3, 1]),
)
OP.samples("_autocast_to_reduced_precision", call(reals(3), True, True, torch.float16, torch.bfloat16))
