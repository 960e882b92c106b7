"""Calls with a symbolic number that PyTorch's own C++ would ask for its value, in terms of calls that keep it symbolic.

The derivatives of `pow` compare their exponent or take its logarithm, those of sums compare their factors with one,
`lerp` subtracts its weight from one, and dropout hands its probability to a kernel as a plain double.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.nn import functional as F

from primtorch.promotion import compute_dtype
from primtorch.symbolic import depends_on_data
from primtorch.symbolic.numbers import is_symbolic


def _as_tensor(number: float, like: torch.Tensor) -> torch.Tensor:
    """A tensor without dims that holds the number, for arithmetic with `like`."""
    return torch.full((), number, dtype=compute_dtype(like.dtype), device=like.device)


def _differentiated(tensor: object) -> TypeGuard[torch.Tensor]:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def _pow(base: torch.Tensor | float, exponent: torch.Tensor | float) -> torch.Tensor:
    if is_symbolic(exponent) and _differentiated(base):
        return torch.pow(base, _as_tensor(exponent, base)).to(base.dtype)
    if is_symbolic(base) and _differentiated(exponent):
        return torch.pow(_as_tensor(base, exponent), exponent).to(exponent.dtype)
    return torch.pow(base, exponent)  # type: ignore[arg-type]  # one of them is a tensor


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
    if not is_symbolic(weight) or not (_differentiated(start) or _differentiated(end)):
        return torch.lerp(start, end, weight)
    number = _as_tensor(weight, start)
    return torch.lerp(start.to(number.dtype), end.to(number.dtype), number).to(start.dtype)


def _lerp_(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
    if not is_symbolic(weight) or not (_differentiated(start) or _differentiated(end)):
        return start.lerp_(end, weight)
    return start.copy_(_lerp(start, end, weight))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not is_symbolic(p) or not training:
        return F.dropout(input, p, training, inplace)
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0.0:
        return input
    kept = 1.0 - p
    noise = torch.zeros_like(input) if kept == 0.0 else torch.bernoulli(torch.full_like(input, kept)) / kept
    return input.mul_(noise) if inplace else input * noise


# Sums with factors, whose derivatives look whether a factor is one, as products and sums.
_SUMS: dict[str, tuple[tuple[str, ...], Callable[..., torch.Tensor]]] = {
    "add": (("alpha",), lambda x, y, alpha: x + y * alpha),
    "sub": (("alpha",), lambda x, y, alpha: x - y * alpha),
    "addcmul": (("value",), lambda x, y, z, value: x + y * z * value),
    "addcdiv": (("value",), lambda x, y, z, value: x + y / z * value),
    "addmm": (("beta", "alpha"), lambda x, y, z, beta, alpha: y @ z * alpha + x * beta),
    "addmv": (("beta", "alpha"), lambda x, y, z, beta, alpha: y @ z * alpha + x * beta),
    "baddbmm": (("beta", "alpha"), lambda x, y, z, beta, alpha: y @ z * alpha + x * beta),
    "addbmm": (("beta", "alpha"), lambda x, y, z, beta, alpha: (y @ z).sum(0) * alpha + x * beta),
    "addr": (("beta", "alpha"), lambda x, y, z, beta, alpha: torch.outer(y, z) * alpha + x * beta),
}


def _sum_of(function: Callable[..., torch.Tensor], name: str, in_place: bool) -> Callable[..., torch.Tensor]:
    """`function` where a factor is a number of the data and the sum is differentiated, of terms of one dtype: as
    these, rounded once."""
    factors, sum_of = _SUMS[name]

    def rule(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked = any(is_symbolic(kwargs.get(factor)) and depends_on_data(kwargs[factor]) for factor in factors)
        tensors = [term for term in args if isinstance(term, torch.Tensor)]
        alike = len(tensors) == len(args) and len({term.dtype for term in tensors}) == 1 and kwargs.keys() <= {*factors}
        if not asked or not alike or not any(map(_differentiated, tensors)):
            return function(*args, **kwargs)
        dtype = tensors[0].dtype
        terms = (term.to(compute_dtype(dtype)) for term in tensors)
        found = sum_of(*terms, *(kwargs.get(factor, 1) for factor in factors)).to(dtype)
        return tensors[0].copy_(found) if in_place else found

    return rule


# Functions as the torch-function mode receives them.
SYMBOLIC_RULES: dict[object, Callable[..., object]] = {
    **{getattr(torch, name): _sum_of(getattr(torch, name), name, False) for name in _SUMS},
    **{getattr(torch.Tensor, name): _sum_of(getattr(torch.Tensor, name), name, False) for name in _SUMS},
    **{getattr(torch.Tensor, f"{name}_"): _sum_of(getattr(torch.Tensor, f"{name}_"), name, True) for name in _SUMS},
    torch.pow: _pow,
    torch.Tensor.pow: _pow,
    torch.Tensor.__pow__: _pow,
    torch.Tensor.__rpow__: lambda exponent, base: _pow(base, exponent),
    torch.lerp: _lerp,
    torch.Tensor.lerp: _lerp,
    torch.Tensor.lerp_: _lerp_,
    F.dropout: _dropout,
    torch.dropout: _dropout,
}
