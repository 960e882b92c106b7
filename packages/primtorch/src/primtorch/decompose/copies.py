"""Copies, conversions of dtype, layout and device, fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.table import RuleTable
from primtorch.layout import channels_last_strides, contiguous_strides
from primtorch.placement import resolved_device
from primtorch.promotion import COMPUTE_DTYPE

aten = torch.ops.aten
RULES = RuleTable()


def _in_format(b: Builder, x: Value, memory_format: torch.memory_format | None) -> Value:
    """Ask for a layout where the program does; else the layout is nobody's business inside the graph."""
    if memory_format is torch.channels_last or memory_format is torch.channels_last_3d:
        return with_strides(b, x, channels_last_strides(x.shape))
    if memory_format is torch.contiguous_format:
        return with_strides(b, x, contiguous_strides(x.shape))
    return x


def with_strides(b: Builder, x: Value, strides: Sequence[Any]) -> Value:
    """x with given strides; a size-1 dimension's stride means nothing but is kept as asked."""
    if tuple(x.spec.strides) == tuple(strides):
        return x
    return b.emit(prims.copy_strided, x, tuple(strides))  # type: ignore[no-any-return]


def _cast(b: Builder, x: Value, dtype: torch.dtype) -> Value:
    """A conversion that stands in the program. One that autocast put there says so, and needs no rounding."""
    if dtype is x.dtype or dtype not in COMPUTE_DTYPE or "autocast" in b.meta:
        return x.to(dtype)
    return b.emit(prims.convert_element_type, x, dtype, True)  # type: ignore[no-any-return]


@RULES(aten.clone.default)
def _clone(b: Builder, x: Value, *, memory_format: torch.memory_format | None = None) -> Value:
    return _in_format(b, x, memory_format)


@RULES(aten.contiguous.default)
def _contiguous(b: Builder, x: Value, *, memory_format: torch.memory_format = torch.contiguous_format) -> Value:
    return _in_format(b, x, memory_format)


@RULES(aten._to_copy.default)
def _to_copy(
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


@RULES("aten::_autocast_to_reduced_precision.default", "aten::_autocast_to_full_precision.default")
def _autocast(b: Builder, x: Value, cuda_enabled: bool, cpu_enabled: bool, *dtypes: torch.dtype) -> Value:
    enabled = cpu_enabled if x.device.type == "cpu" else cuda_enabled
    if not enabled or not x.dtype.is_floating_point:
        return x
    if not dtypes:
        return x.to(torch.float32)
    return x.to(dtypes[1] if x.device.type == "cpu" else dtypes[0])


@RULES(aten.copy.default)
def _copy(b: Builder, x: Value, src: Value, non_blocking: bool = False) -> Value:
    if src.device != x.device:
        src = b.emit(prims.device_put, src, x.device)
    return _cast(b, src, x.dtype).expand(x.shape)


@RULES(aten.fill.Scalar, aten.fill.Tensor)
def _fill(b: Builder, x: Value, value: Any) -> Value:
    if isinstance(value, Value):
        return value.to(x.dtype).expand(x.shape)
    return b.full_like(x, value)


@RULES(aten.zero.default)
def _zero(b: Builder, x: Value) -> Value:
    return b.full_like(x, 0)
