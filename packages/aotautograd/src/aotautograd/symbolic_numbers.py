"""Calls with a symbolic number that PyTorch's own C++ would ask for its value, in terms of calls that keep it symbolic.

The derivatives of `pow` compare their exponent or take its logarithm, `lerp` subtracts its weight from one, and
dropout hands its probability to a kernel as a plain double.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch.nn import functional as F

from primtorch.promotion import compute_dtype
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
    if is_symbolic(weight):
        weight = torch.full((), weight, dtype=start.dtype, device=start.device)
    return torch.lerp(start, end, weight)


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


# Functions as the torch-function mode receives them.
SYMBOLIC_RULES: dict[object, Callable[..., object]] = {
    torch.pow: _pow,
    torch.Tensor.pow: _pow,
    torch.Tensor.__pow__: _pow,
    torch.Tensor.__rpow__: lambda exponent, base: _pow(base, exponent),
    torch.lerp: _lerp,
    torch.Tensor.lerp: _lerp,
    F.dropout: _dropout,
    torch.dropout: _dropout,
}
