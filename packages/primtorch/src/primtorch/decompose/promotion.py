"""ATen's type promotion: tensors with dimensions outrank 0-d tensors, which outrank Python numbers, within a kind."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

COMPUTE_DTYPE: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex32: torch.complex64,
}
_COMPLEX_OF = {
    torch.float16: torch.complex32,
    torch.bfloat16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
promote_types = lru_cache(maxsize=None)(torch.promote_types)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which arithmetic on `dtype` is done: float32 for the reduced-precision floats."""
    return COMPUTE_DTYPE.get(dtype, dtype)


def number_dtype(value: Any) -> torch.dtype:
    """The dtype a Python number stands for in promotion."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, (int, torch.SymInt)):
        return torch.int64
    if isinstance(value, complex):
        return _COMPLEX_OF[torch.get_default_dtype()]
    return torch.get_default_dtype()


def _merge(known: torch.dtype | None, other: torch.dtype) -> torch.dtype:
    return other if known is None or known is other else promote_types(known, other)


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """The kind of the lower category counts only where it is above the higher one's."""
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return _COMPLEX_OF[higher] if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return promote_types(higher, lower)
    return higher


def result_dtype(operands: Iterable[Any]) -> torch.dtype:
    """Promote tensors (anything with `.spec`) and Python numbers; None operands do not count."""
    dimensioned: torch.dtype | None = None
    zero_dim: torch.dtype | None = None
    number: torch.dtype | None = None
    for operand in operands:
        spec = getattr(operand, "spec", None)
        if spec is not None:
            if spec.shape:
                dimensioned = _merge(dimensioned, spec.dtype)
            else:
                zero_dim = _merge(zero_dim, spec.dtype)
        elif operand is not None:
            number = _merge(number, number_dtype(operand))
    dtype = _combine(dimensioned, _combine(zero_dim, number))
    assert dtype is not None, "promotion needs an operand"
    return dtype


def floating(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or the default float for integers and bool."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def number_as(value: Any, dtype: torch.dtype) -> Any:
    """A Python number in the kind of `dtype`, so that a prim takes it."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    if dtype.is_complex:
        return complex(value)
    if dtype.is_floating_point:
        return float(value)
    if dtype is torch.bool:
        return bool(value)
    return int(value)
