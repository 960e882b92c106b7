"""Type promotion: the dtype of a result from tensors, 0-d tensors and Python numbers.

The rule (torch's documentation, "Type promotion"): tensors with dims decide, unless a 0-d tensor or a number is of a
higher category (bool < integer < float < complex); a number of a higher category brings the default dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Protocol

import torch

from primtorch.arguments import Number, Sizes

COMPUTE_DTYPE: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex32: torch.complex64,
}
REDUCED_PRECISION = frozenset(COMPUTE_DTYPE)
_COMPLEX_OF = {
    torch.float16: torch.complex32,
    torch.bfloat16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
_REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_NUMBER_TYPES: dict[type, str] = {
    bool: "bool",
    torch.SymBool: "bool",
    int: "int",
    torch.SymInt: "int",
    float: "float",
    torch.SymFloat: "float",
    complex: "complex",
}


def complex_of(dtype: torch.dtype) -> torch.dtype:
    """The complex dtype whose parts have this dtype (complex64 for bfloat16)."""
    return _COMPLEX_OF.get(dtype, dtype)


def real_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a complex dtype's parts; a real dtype itself."""
    return _REAL_OF.get(dtype, dtype)


def number_dtype(number: Number) -> torch.dtype:
    """The dtype that a Python number stands for."""
    match _NUMBER_TYPES[type(number)]:
        case "bool":
            return torch.bool
        case "int":
            return torch.int64
        case "float":
            return torch.get_default_dtype()
    return complex_of(torch.get_default_dtype())


def category(dtype: torch.dtype) -> int:
    """0 bool, 1 integer, 2 float, 3 complex."""
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


@lru_cache(maxsize=4096)
def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """The dtype of operands of a higher and of a lower rank of importance."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return complex_of(higher) if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


@lru_cache(maxsize=4096)
def _with_number(dtype: torch.dtype, kind: str, default: torch.dtype) -> torch.dtype:
    number = {"bool": torch.bool, "int": torch.int64, "float": default, "complex": complex_of(default)}[kind]
    result = _combine(dtype, number)
    assert result is not None
    return result


def promote_number(dtype: torch.dtype, number: Number) -> torch.dtype:
    """The dtype of a tensor and a Python number."""
    return _with_number(dtype, _NUMBER_TYPES[type(number)], torch.get_default_dtype())


class Typed(Protocol):
    """A tensor as far as promotion goes: a descriptor, a tensor, or a rule's Value."""

    @property
    def shape(self) -> Sizes:
        """Sizes; () for one that is promoted as a 0-d tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that takes part."""


def result_type(operands: Iterable[Typed | Number | None]) -> torch.dtype:
    """The dtype of tensors and Python numbers; None is skipped."""
    dims: torch.dtype | None = None
    zero: torch.dtype | None = None
    numbers: torch.dtype | None = None
    operand: Any  # told apart by its type, which is cheaper than isinstance
    for operand in operands:
        if operand is None:
            continue
        if type(operand) not in _NUMBER_TYPES:
            dtype = operand.dtype
            if operand.shape:
                dims = dtype if dims is None or dims is dtype else torch.promote_types(dims, dtype)
            else:
                zero = dtype if zero is None else torch.promote_types(zero, dtype)
        else:
            dtype = number_dtype(operand)
            numbers = dtype if numbers is None else torch.promote_types(numbers, dtype)
    result = _combine(dims, _combine(zero, numbers))
    if result is None:
        raise RuntimeError("result_type: at least one operand is needed")
    return result


def float_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or the default dtype for integers and bool."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def integer_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sum, prod and cumsum accumulate into: int64 for integers and bool."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which arithmetic on `dtype` is done: float32 (complex64) for the reduced-precision floats."""
    return COMPUTE_DTYPE.get(dtype, dtype)


def number_as(value: Number, dtype: torch.dtype) -> Number:
    """A Python number in the kind of `dtype`, so that a prim takes it.

    Raises:
        TypeError: a complex number for a dtype that is not.
    """
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    if dtype.is_complex:
        return complex(value)  # type: ignore[arg-type]
    if dtype.is_floating_point:
        return float(value)  # type: ignore[arg-type]
    if dtype is torch.bool:
        return bool(value)
    return int(value)  # type: ignore[arg-type]
