"""Softmax and its logarithm, with their gradients."""

from __future__ import annotations

import math

import torch

from primtorch import prims
from primtorch.arguments import TensorLike
from primtorch.builder import Builder, Value
from primtorch.families import Family, Trait
from primtorch.layout import wrap_dim
from primtorch.operators.build import contiguous
from primtorch.operators.refusals import refuse_other_shape
from primtorch.promotion import compute_dtype
from primtorch.samples import call, listed, reals, truths
from primtorch.spec import TensorSpec

OP = Family("softmax")
OP.trait(Trait.ONE_DEVICE, "_log_softmax_backward_data _softmax_backward_data")


def _shifted(x: Value, dim: int) -> Value:
    return x - x.reduce(prims.amax, (dim,), True) if x.rank else x - x


def _is_empty(x: Value, dim: int) -> bool:
    return x.rank > 0 and isinstance(x.shape[dim], int) and x.shape[dim] == 0


@OP.formula("_softmax", "_log_softmax")
def _softmax(x: TensorLike, dim: int, half_to_float: bool) -> TensorSpec:
    wrap_dim(dim, x.dim())
    shape = tuple(x.shape)
    return contiguous(x, shape, torch.float32 if half_to_float else x.dtype)


@OP.rule("_softmax")
def lower_softmax(b: Builder, x: Value, dim: int, half_to_float: bool = False) -> Value:
    """exp(x - max) / sum exp(x - max) along a dim, rounded once."""
    out_dtype = torch.float32 if half_to_float is True else x.dtype
    wide, dim = x.compute(), x.dim(dim)
    if _is_empty(x, dim):
        return wide.to(out_dtype)
    e = _shifted(wide, dim).map(prims.exp)
    return (e / (e.sum((dim,), True) if x.rank else e)).to(out_dtype)


@OP.formula("_safe_softmax")
def _safe_softmax(x: TensorLike, dim: int, dtype: torch.dtype | None = None) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape, dtype or x.dtype)


@OP.rule("_safe_softmax?")
def _lower_safe_softmax(b: Builder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax whose rows of minus infinity alone give zeros."""
    wide = x if dtype is None else x.to(dtype)
    out = lower_softmax(b, wide, dim, False)
    if not x.rank or _is_empty(x, x.dim(dim)):
        return out
    return b.where(wide.eq(-math.inf).reduce(prims.all, (x.dim(dim),), True), 0, out)


@OP.rule("_log_softmax")
def _lower_log_softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    out_dtype = torch.float32 if half_to_float else x.dtype
    wide, dim = x.compute(), x.dim(dim)
    if _is_empty(x, dim):
        return wide.to(out_dtype)
    shifted = _shifted(wide, dim)
    e = shifted.map(prims.exp)
    return (shifted - (e.sum((dim,), True) if x.rank else e).map(prims.log)).to(out_dtype)


@OP.formula("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad: TensorLike, output: TensorLike, dim: int, input_dtype: torch.dtype) -> TensorSpec:
    wrap_dim(dim, grad.dim())
    refuse_other_shape("grad", grad, output.shape)
    return contiguous(grad, grad.shape, input_dtype)


@OP.rule("_softmax_backward_data")
def _lower_softmax_backward(b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    compute, dim = compute_dtype(grad.dtype), output.dim(dim)
    y = output.to(compute)
    product = grad.to(compute) * y
    total = product.sum((dim,), True) if output.rank else product
    return (product - y * total).to(input_dtype)


@OP.rule("_log_softmax_backward_data")
def _lower_log_softmax_backward(b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    compute, dim = compute_dtype(grad.dtype), output.dim(dim)
    g = grad.to(compute)
    total = g.sum((dim,), True) if output.rank else g
    return (g - output.to(compute).map(prims.exp) * total).to(input_dtype)


@OP.rule("_masked_softmax")
def lower_masked_softmax(
    b: Builder, x: Value, mask: Value, dim: int | None = None, mask_type: int | None = None
) -> Value:
    """Softmax over the elements whose mask is false; NaN where there are none."""
    dim = x.rank - 1 if dim is None else x.dim(dim)
    if mask_type == 0:
        mask = mask.unsqueeze(0, 1)
    elif mask_type == 1:
        mask = mask.unsqueeze(1, 2)
    wide = b.where(mask.expand(x.shape), -math.inf, x.compute())
    e = (wide - wide.reduce(prims.amax, (dim,), True)).map(prims.exp)
    return (e / e.sum((dim,), True)).to(x.dtype)


@OP.formula("_masked_softmax_backward")
def _masked_softmax_backward(
    grad: TensorLike, output: TensorLike, mask: TensorLike, dim: int | None = None
) -> TensorSpec:
    return contiguous(grad, grad.shape)


@OP.rule("_masked_softmax_backward")
def _lower_masked_softmax_backward(
    b: Builder, grad: Value, output: Value, mask: Value, dim: int | None = None
) -> Value:
    dim = output.rank - 1 if dim is None else output.dim(dim)
    y, g = output.compute(), grad.compute()
    g = b.where(mask.expand(grad.shape), 0.0, g)
    product = g * y
    return (product - y * product.sum((dim,), True)).to(grad.dtype)


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("softmax.int", "log_softmax.int")
def _softmax_as(x: TensorLike, dim: int, dtype: torch.dtype | None = None) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape, dtype or x.dtype)


# --- samples ---------------------------------------------------------------------------------------

OP.samples("_log_softmax_backward_data _softmax_backward_data", call(reals(3, 4), reals(3, 4), 1, torch.float32))
OP.samples("_masked_softmax", call(reals(3, 4), truths(3, 4), 1, 2))
OP.samples(
    "_masked_softmax_backward",
    call(reals(2, 2), listed([0.0, 1.0], [0.25, 0.75]), listed([True, False], [False, False]), 1),
)
