"""Tensors from nothing: constants, ranges, identity and triangles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value, same_size
from primtorch.decompose.table import RuleTable
from primtorch.layout import strides_in_order
from primtorch.placement import resolved_device
from primtorch.promotion import number_dtype

aten = torch.ops.aten
RULES = RuleTable()


def _made(b: Builder, size: Sequence[Any], value: Any, dtype: Any, device: Any) -> Value:
    return b.full(size, value, dtype or torch.get_default_dtype(), resolved_device(device))


@RULES(aten.full.default)
def _full(
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


@RULES(aten.zeros.default, aten.empty.memory_format)
def _zeros(
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


@RULES(aten.ones.default)
def _ones(
    b: Builder,
    size: Sequence[Any],
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Value:
    return _made(b, size, 1, dtype, device)


@RULES(aten.scalar_tensor.default)
def _scalar_tensor(
    b: Builder, value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Value:
    return _made(b, (), value, dtype, device)


def _like(value: Any) -> Any:
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


RULES.add(aten.zeros_like.default, _like(0))
RULES.add(aten.ones_like.default, _like(1))
RULES.add(aten.empty_like.default, _like(0))


@RULES(aten.full_like.default)
def _full_like(b: Builder, x: Value, value: Any, **options: Any) -> Value:
    return _like(value)(b, x, **options)  # type: ignore[no-any-return]


def _new(value: Any) -> Any:
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


RULES.add(aten.new_zeros.default, _new(0))
RULES.add(aten.new_ones.default, _new(1))
RULES.add(aten.new_empty.default, _new(0))


@RULES(aten.new_full.default)
def _new_full(b: Builder, x: Value, size: Sequence[Any], value: Any, **options: Any) -> Value:
    return _new(value)(b, x, size, **options)  # type: ignore[no-any-return]


@RULES(aten.new_empty_strided.default)
def _new_empty_strided(
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
    return _empty_strided(b, size, stride, dtype=dtype or x.dtype, device=device or x.device)  # type: ignore[no-any-return]


@RULES(aten.empty_strided.default)
def _empty_strided(
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


@RULES(aten.empty_permuted.default)
def _empty_permuted(
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
    return _empty_strided(b, size, strides, dtype=dtype, device=device)  # type: ignore[no-any-return]


def _count(start: Any, end: Any, step: Any) -> Any:
    if all(isinstance(v, (int, torch.SymInt)) for v in (start, end, step)):
        return (end - start + step - 1) // step if step > 0 else (start - end - step - 1) // -step
    return math.ceil((end - start) / step)


@RULES(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(
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


@RULES(aten.range.default, aten.range.step)
def _range(
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


@RULES(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def linspace(
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


def _end(value: Any, dtype: torch.dtype, work: torch.dtype) -> Any:
    """An end of a range as eager has it: for integers it is cut first."""
    if dtype.is_floating_point or dtype.is_complex:
        return value.to(work) if isinstance(value, Value) else value
    return value.to(torch.int64).to(work) if isinstance(value, Value) else int(value)


@RULES(aten.logspace.default, aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor)
def _logspace(
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
    exponents = linspace(b, start, end, steps, dtype=work, device=device)
    return b.binary(prims.pow, float(base), exponents).to(dtype)


@RULES(aten.eye.default, aten.eye.m)
def _eye(
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


@RULES(aten.tril.default)
def _tril(b: Builder, x: Value, diagonal: Any = 0) -> Value:
    return b.where(triangle(b, x.shape[-2], x.shape[-1], diagonal, x.device), x, 0)


@RULES(aten.triu.default)
def _triu(b: Builder, x: Value, diagonal: Any = 0) -> Value:
    return b.where(triangle(b, x.shape[-2], x.shape[-1], diagonal - 1, x.device), b.full((), 0, x.dtype, x.device), x)
