"""Ufuncs of NumPy as torch calls, on operands that have the dtypes of the ufunc's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

from torchdynamo.reasons import BreakGraph

Operand: TypeAlias = torch.Tensor | float | complex
Program: TypeAlias = Callable[..., torch.Tensor]


def _is_whole(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return isinstance(value, int)


def _tensors(first: torch.Tensor, *others: Operand) -> tuple[torch.Tensor, ...]:
    """Operands of which the first is a tensor, with the others as tensors, too."""
    made = (
        value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=first.dtype, device="cpu")
        for value in others
    )
    return first, *made


def _of_tensors(function: Program) -> Program:
    return lambda *values: function(*_tensors(*values))


def _divided(divide: Program) -> Program:
    """A division of whole numbers, which by zero gives zero."""

    def program(a: torch.Tensor, b: Operand) -> torch.Tensor:
        if not _is_whole(a):
            return divide(a, b)
        if not isinstance(b, torch.Tensor):
            return divide(a, b) if b else torch.zeros_like(a)
        zero = b == 0
        return torch.where(zero, torch.zeros_like(a), divide(a, torch.where(zero, torch.ones_like(b), b)))

    return program


_floor_divide = _divided(torch.floor_divide)
_remainder = _divided(torch.remainder)
_fmod = _divided(torch.fmod)


def _divmod(a: torch.Tensor, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    return _floor_divide(a, b), _remainder(a, b)


def _absolute(a: torch.Tensor) -> torch.Tensor:
    return a.clone() if a.dtype in (torch.bool, torch.uint8) else torch.abs(a)


def _modf(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.trunc(a)
    part = torch.where(torch.isinf(a), torch.zeros_like(a), a - whole)
    return torch.copysign(part, a), whole


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


def _sign(a: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(a), a, torch.sign(a)) if a.is_floating_point() else torch.sign(a)


def _heaviside(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(a), a, torch.heaviside(a, b))


def _by_parts(function: Program) -> Program:
    """A sum, of complex numbers in each part: torch multiplies one operand, and infinite parts become NaN."""

    def program(a: torch.Tensor, b: Operand) -> torch.Tensor:
        if not a.is_complex():
            return function(a, b)
        a, b = _tensors(a, b)
        return torch.complex(function(torch.real(a), torch.real(b)), function(torch.imag(a), torch.imag(b)))

    return program


def _truth(function: Program) -> Program:
    """A function of truth values, on those of any elements."""
    return lambda *values: function(
        *(value != 0 if value.dtype != torch.bool else value for value in _tensors(*values))
    )


_UNARY = {
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "arcsin": torch.asin, "arccos": torch.acos,
    "arctan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh, "arcsinh": torch.asinh,
    "arccosh": torch.acosh, "arctanh": torch.atanh, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "square": torch.square, "reciprocal": torch.reciprocal, "negative": torch.neg, "positive": torch.clone,
    "absolute": _absolute, "fabs": torch.abs, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc,
    "rint": torch.round, "sign": _sign, "isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite,
    "signbit": torch.signbit, "invert": torch.bitwise_not, "conjugate": torch.conj_physical, "deg2rad": torch.deg2rad,
    "radians": torch.deg2rad, "rad2deg": torch.rad2deg, "degrees": torch.rad2deg,
    "logical_not": _truth(torch.logical_not), "modf": _modf,
}  # fmt: skip
_BINARY = {
    "add": _by_parts(torch.add), "subtract": _by_parts(torch.sub), "multiply": torch.mul,
    "true_divide": torch.true_divide, "floor_divide": _floor_divide, "remainder": _remainder, "fmod": _fmod,
    "divmod": _divmod, "power": torch.pow, "float_power": _of_tensors(torch.pow),
    "maximum": _of_tensors(torch.maximum), "minimum": _of_tensors(torch.minimum),
    "fmax": _of_tensors(torch.fmax), "fmin": _of_tensors(torch.fmin), "arctan2": _of_tensors(torch.atan2),
    "hypot": _of_tensors(torch.hypot), "copysign": _of_tensors(torch.copysign),
    "nextafter": _of_tensors(torch.nextafter), "logaddexp": _of_tensors(torch.logaddexp),
    "logaddexp2": _of_tensors(torch.logaddexp2), "heaviside": _of_tensors(_heaviside), "equal": torch.eq,
    "not_equal": torch.ne, "less": torch.lt, "less_equal": torch.le, "greater": torch.gt, "greater_equal": torch.ge,
    "logical_and": _truth(torch.logical_and), "logical_or": _truth(torch.logical_or),
    "logical_xor": _truth(torch.logical_xor), "bitwise_and": _of_tensors(torch.bitwise_and),
    "bitwise_or": _of_tensors(torch.bitwise_or), "bitwise_xor": _of_tensors(torch.bitwise_xor),
    "left_shift": _of_tensors(torch.bitwise_left_shift), "right_shift": _of_tensors(torch.bitwise_right_shift),
    "gcd": _of_tensors(torch.gcd), "lcm": _of_tensors(torch.lcm), "matmul": _matmul,
}  # fmt: skip
UFUNCS: dict[object, Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]] = {}
if numpy is not None:
    UFUNCS = {getattr(numpy, name): program for name, program in (_UNARY | _BINARY).items()}

# Where torch and NumPy order complex numbers, or take functions of them, differently.
_COMPLEX = frozenset(
    {
        "sin", "cos", "sinh", "cosh", "exp", "sqrt", "log", "square", "negative", "positive", "absolute", "conjugate",
        "add", "subtract", "multiply", "true_divide", "divide", "equal", "not_equal", "matmul", "isnan", "isinf",
        "isfinite",
    }
)  # fmt: skip
# What whole numbers cannot be told without their values: negative powers, which NumPy refuses; shifts by too many bits.
_KNOWN_SECOND = frozenset({"power", "left_shift", "right_shift"})
_NOT_WHOLE = frozenset({"reciprocal"})


def takes(function: numpy.ufunc, loop: Sequence[numpy.dtype], args: Sequence[object]) -> None:
    """Raises BreakGraph where a program is not NumPy's function on these dtypes."""
    name, dtype = function.__name__, loop[0]
    fits = name in _COMPLEX if dtype.kind == "c" else True
    if dtype.kind in "iu":
        fits = name not in _NOT_WHOLE
        if name in _KNOWN_SECOND:
            second = args[1]
            bits = dtype.itemsize * 8 - 1
            fits = type(second) is int and second >= 0 and (name == "power" or second < bits)
    if dtype.kind == "b":
        fits = name not in ("matmul",)
    if not fits:
        raise BreakGraph("numpy", f"call of numpy.{name} on elements of {dtype}")
