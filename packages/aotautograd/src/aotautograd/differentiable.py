"""Operators of a joint graph that autograd cannot pass, or passes without all of their history, as others that it can.

A joint graph has the operators of the first derivative, as torch's formulas call them where no derivative of them is
wanted. Where one is, torch takes other operators; and the functional forms of writes, which stand for the writes
themselves, have no derivative of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import fx

from aotautograd.convolutions import convolution_backward

aten = torch.ops.aten


def _silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`g s (1 + x (1 - s))` with `s = sigmoid(x)`."""
    sigmoid = x.sigmoid()
    return grad * sigmoid * (1 + x * (1 - sigmoid))


def _mish_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`g (t + x s (1 - t^2))` with `s = sigmoid(x)` and `t = tanh(softplus(x))`."""
    sigmoid, tanh = x.sigmoid(), torch.nn.functional.softplus(x).tanh()
    return grad * (tanh + x * sigmoid * (1 - tanh * tanh))


def _logit_backward(grad: torch.Tensor, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """`g / (x (1 - x))` from `eps` to `1 - eps`; outside of it 0, without `eps` (outside of [0, 1]) NaN."""
    low, outside = (0.0, torch.nan) if eps is None else (eps, 0.0)
    within = (x >= low) & (x <= 1.0 - low)
    x = x.where(within, 0.5)  # so that what is not taken has a finite slope
    return (grad / (x * (1 - x))).where(within, outside)


def _native_group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    n: int,
    channels: int,
    pixels: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `x` (N, C, ...), the weight (C,) and the bias (C,); None where `output_mask` has False.

    With `z = (x - mean) rstd` and `h = g weight`, and E the mean over a group of a sample, that of `x` is
    `rstd (h - E[h] - z E[h z])`, that of the weight the sum of `g z` over samples and pixels, and that of the bias the
    sum of `g`. In reduced precision the arithmetic is that of float32.

    `mean` and `rstd` (N, groups) are results of the forward, and lead to `x` themselves.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    grouped = (n, groups, channels // groups, pixels)
    g = grad.to(dtype).reshape(grouped)
    scale = rstd.to(dtype).reshape(n, groups, 1, 1)
    z = (x.to(dtype).reshape(grouped) - mean.to(dtype).reshape(n, groups, 1, 1)) * scale
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        h = g if weight is None else g * weight.to(dtype).reshape(1, groups, channels // groups, 1)
        inner = h - h.mean((2, 3), keepdim=True) - z * (h * z).mean((2, 3), keepdim=True)
        of_x = (scale * inner).reshape(x.shape).to(x.dtype)
    parameter = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        of_weight = (g * z).sum((0, 3)).reshape(channels).to(parameter)
    if output_mask[2]:
        of_bias = g.sum((0, 3)).reshape(channels).to(parameter)
    return of_x, of_weight, of_bias


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`source` in the shape, dtype and layout of `x`, of whose values it has nothing."""
    return x.new_empty_strided(x.shape, x.stride()).copy_(source, non_blocking)


def _slice_scatter(
    x: torch.Tensor, source: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    return _of_parts(aten.slice_scatter.default, x, source, dim % x.dim(), start, end, step)


def _select_scatter(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    return _of_parts(aten.select_scatter.default, x, source, dim % x.dim(), index)


def _of_parts(
    scatter: Callable[..., torch.Tensor], x: torch.Tensor, source: torch.Tensor, *place: object
) -> torch.Tensor:
    """A scatter along a dimension, of complex numbers as that of pairs: it has a derivative for real numbers alone."""
    if not x.is_complex():
        return scatter(x, source, *place)
    pairs = scatter(torch.view_as_real(x.resolve_conj()), torch.view_as_real(source.resolve_conj()), *place)
    return torch.view_as_complex(pairs)


def cumprod_backward(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """`prod_{i<k} x_i` times `sum_{j>=k} g_j prod_{k<i<=j} x_i` for each k, whatever of `x` is zero.

    The sum for k is `g_k + x_{k+1}` times that for k + 1; it is made for spans of twice the length, again and again.
    """
    x, total = x.conj().movedim(dim, -1), grad.to(x.dtype).movedim(dim, -1)
    before = F.pad(x[..., :-1], (1, 0), value=1.0).cumprod(-1)
    factor, span = F.pad(x[..., 1:], (0, 1)), 1  # the product of as many elements as a span has, behind each
    while span < x.shape[-1]:
        total = total + factor * F.pad(total[..., span:], (0, span))
        factor = factor * F.pad(factor[..., span:], (0, span))
        span *= 2
    return (before * total).movedim(-1, dim)


# In grad mode autograd takes other operators for them, or the writes that they are the functional forms of.
OPERATORS: Mapping[object, Callable[..., object]] = {
    aten.silu_backward.default: _silu_backward,
    aten.mish_backward.default: _mish_backward,
    aten.logit_backward.default: _logit_backward,
    aten.native_group_norm_backward.default: _native_group_norm_backward,
    aten.convolution_backward.default: convolution_backward,
    aten.copy.default: _copy,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
}

# The place of `LU` among the results of an operator on matrices, which is there for the derivative alone.
_FACTORS: Mapping[object, int] = {
    aten._linalg_det.default: 1,
    aten._linalg_slogdet.default: 2,
    aten._linalg_solve_ex.default: 1,
}


def factors(node: fx.Node) -> tuple[fx.Node, Callable[[torch.Tensor], torch.Tensor]] | None:
    """For the factors that a determinant or a solution keeps for its derivative: the node of the matrix, and what makes
    them of it with their history, without which a second derivative would take them for constants.

    They may be those of the transposed matrix, as its layout and the release have it. The derivatives all solve with
    the adjoint matrix, so how they do it with the factors says whose these are.
    """
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or _FACTORS.get(source.target) != node.args[1]:
        return None
    matrix, solve = source.args[0], _solved_with(node)
    if solve is None or not isinstance(matrix, fx.Node):
        return None
    return matrix, _factors_of if solve.kwargs.get("adjoint", False) else _factors_of_transposed


def _solved_with(node: fx.Node) -> fx.Node | None:
    """The nearest node that solves with factors, as they are or without zeros in their diagonal."""
    work, seen = [node], {node}
    for reader in work:
        if reader.target is aten.linalg_lu_solve.default:
            return reader
        work.extend(n for n in reader.users if n not in seen)
        seen.update(reader.users)
    return None


def _factors_of(matrix: torch.Tensor) -> torch.Tensor:
    """`L` without its diagonal of ones, and `U`, of (..., n, n), in one tensor."""
    factored: torch.Tensor = torch.linalg.lu_factor_ex(matrix).LU
    return factored


def _factors_of_transposed(matrix: torch.Tensor) -> torch.Tensor:
    return _factors_of(matrix.mT)
