"""Layer, batch and group normalisation, softmax and negative log-likelihood, each with its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.decompose.activations import _MEAN, _NONE
from primtorch.decompose.builder import Builder, Value
from primtorch.decompose.table import RuleTable
from primtorch.layout import product
from primtorch.promotion import compute_dtype

aten = torch.ops.aten
RULES = RuleTable()


def _rsqrt(variance: Value, eps: float) -> Value:
    return (variance + eps).map(prims.rsqrt)


def _statistics_dtype(x: Value, *parameters: Value | None) -> torch.dtype:
    """Where eager keeps mean and rstd of a normalisation: float32 for reduced precision on a GPU, and on the CPU
    where the parameters are float32; else x's dtype."""
    mixed = any(p is not None and p.dtype is not x.dtype for p in parameters)
    return x.dtype if x.device.type == "cpu" and not mixed else compute_dtype(x.dtype)


# --- layer norm ----------------------------------------------------------------------------------
@RULES(aten.native_layer_norm.default)
def _layer_norm(
    b: Builder, x: Value, normalized_shape: Sequence[Any], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """(x - mean) * rstd * weight + bias over the last dims (Ba, Kiros, Hinton 2016)."""
    dims = tuple(range(x.rank - len(normalized_shape), x.rank))
    wide = x.compute()
    var, mean = b.emit(prims.var_mean, wide, dims, 0.0, True)
    rstd = _rsqrt(var, eps)
    out = (wide - mean) * rstd
    if weight is not None:
        out = out * weight.to(wide.dtype)
    if bias is not None:
        out = out + bias.to(wide.dtype)
    kept = _statistics_dtype(x, weight, bias)
    return out.to(x.dtype), mean.to(kept), rstd.to(kept)


@RULES(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[Any],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    first = x.rank - len(normalized_shape)
    dims, outer = tuple(range(first, x.rank)), tuple(range(first))
    compute = compute_dtype(x.dtype)
    g, rstd = grad.to(compute), rstd.to(compute)
    x_hat = (x.to(compute) - mean.to(compute)) * rstd
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        inner = g if weight is None else g * weight.to(compute)
        n = product([x.shape[d] for d in dims])
        sum_g, sum_gx = inner.sum(dims, True), (inner * x_hat).sum(dims, True)
        grad_x = (rstd * (inner - sum_g / n - x_hat * (sum_gx / n))).to(x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = (g * x_hat).sum(outer).to(weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = g.sum(outer).to(bias.dtype)
    return grad_x, grad_weight, grad_bias


@RULES("aten::_fused_rms_norm.default")
def _rms_norm(
    b: Builder, x: Value, normalized_shape: Sequence[Any], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""
    dims = tuple(range(x.rank - len(normalized_shape), x.rank))
    wide = x.compute()
    rstd = _rsqrt((wide * wide).mean(dims, True), torch.finfo(wide.dtype).eps if eps is None else eps)
    out = wide * rstd
    if weight is not None:
        out = out * weight.to(wide.dtype)
    return out.to(x.dtype), rstd.to(_statistics_dtype(x, weight))


@RULES("aten::_fused_rms_norm_backward.default")
def _rms_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[Any],
    rstd: Value,
    weight: Value | None,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    first = x.rank - len(normalized_shape)
    dims, outer = tuple(range(first, x.rank)), tuple(range(first))
    compute = compute_dtype(x.dtype)
    g, rstd = grad.to(compute), rstd.to(compute)
    x_hat = x.to(compute) * rstd
    grad_x = grad_weight = None
    if output_mask[0]:
        inner = g if weight is None else g * weight.to(compute)
        grad_x = (rstd * (inner - x_hat * (inner * x_hat).mean(dims, True))).to(x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = (g * x_hat).sum(outer).to(weight.dtype)
    return grad_x, grad_weight


# --- batch norm ----------------------------------------------------------------------------------
def _per_channel(v: Value, rank: int) -> Value:
    return v.unsqueeze(0, *range(2, rank)) if rank > 1 else v


def _other_dims(x: Value) -> tuple[int, ...]:
    return (0, *range(2, x.rank))


def _batch_norm_parts(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value, Value | None, Value | None]:
    """(output, mean, rstd, new running mean, new running variance), statistics of (C,) in the compute dtype."""
    wide = x.compute()
    dims = _other_dims(x)
    new_mean, new_var = running_mean, running_var
    if training:
        var, mean = b.emit(prims.var_mean, wide, dims, 0.0, False)
        count = product([x.shape[d] for d in dims])
        if running_mean is not None:
            old = running_mean.to(wide.dtype)
            new_mean = (mean * momentum + old * (1.0 - momentum)).to(running_mean.dtype)
        if running_var is not None:
            old = running_var.to(wide.dtype)
            unbiased = var * (count / (count - 1)) if not (isinstance(count, int) and count == 1) else var
            new_var = (unbiased * momentum + old * (1.0 - momentum)).to(running_var.dtype)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean.to(wide.dtype), running_var.to(wide.dtype)
    rstd = _rsqrt(var, eps)
    out = (wide - _per_channel(mean, x.rank)) * _per_channel(rstd, x.rank)
    if weight is not None:
        out = out * _per_channel(weight.to(wide.dtype), x.rank)
    if bias is not None:
        out = out + _per_channel(bias.to(wide.dtype), x.rank)
    return out.to(x.dtype), mean, rstd, new_mean, new_var


def _saved(
    b: Builder, x: Value, mean: Value, rstd: Value, training: bool, *parameters: Value | None
) -> tuple[Value, Value]:
    kept = _statistics_dtype(x, *parameters)
    if training:
        return mean.to(kept), rstd.to(kept)
    empty = b.full((0,), 0, kept, x.device)
    return (empty, empty) if x.device.type == "cpu" else (mean.to(kept), rstd.to(kept))


@RULES(aten.native_batch_norm.default)
def _native_batch_norm(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    out, mean, rstd, _, _ = _batch_norm_parts(b, x, weight, bias, running_mean, running_var, training, momentum, eps)
    return (out, *_saved(b, x, mean, rstd, training, weight, bias, running_mean, running_var))


@RULES(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> tuple[Value, ...]:
    return _native_batch_norm(b, x, weight, bias, None, None, training, momentum, eps)  # type: ignore[no-any-return]


@RULES(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_no_training(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    return _native_batch_norm(b, x, weight, bias, running_mean, running_var, False, momentum, eps)  # type: ignore[no-any-return]


@RULES(aten._native_batch_norm_legit_functional.default)
def _batch_norm_functional(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    out, mean, rstd, new_mean, new_var = _batch_norm_parts(
        b, x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return (out, *_saved(b, x, mean, rstd, training, weight, bias, running_mean, running_var), new_mean, new_var)


@RULES("aten::_batch_norm_with_update_functional.default")
def _batch_norm_with_update(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    out, mean, rstd, new_mean, new_var = _batch_norm_parts(
        b, x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    saved = _saved(b, x, mean, rstd, True, weight, bias, running_mean, running_var)
    return (out, *saved, b.full((0,), 0, torch.uint8, x.device), new_mean, new_var)


@RULES("aten::_batch_norm_no_update.default")
def _batch_norm_no_update(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    out = _native_batch_norm(b, x, weight, bias, running_mean, running_var, False, momentum, eps)
    return (*out, b.full((0,), 0, torch.uint8, x.device))


# --- batch norm over several devices -----------------------------------------------------------------
@RULES(aten.batch_norm_stats.default)
def _batch_norm_stats(b: Builder, x: Value, eps: float) -> tuple[Value, Value]:
    var, mean = b.emit(prims.var_mean, x.compute(), _other_dims(x), 0.0, False)
    return mean, _rsqrt(var, eps)


@RULES(aten.batch_norm_update_stats.default)
def _batch_norm_update_stats(
    b: Builder, x: Value, running_mean: Value | None, running_var: Value | None, momentum: float
) -> tuple[Value, Value]:
    var, mean = b.emit(prims.var_mean, x.compute(), _other_dims(x), 0.0, False)
    return mean, var


@RULES(aten.batch_norm_elemt.default)
def _batch_norm_elemt(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, mean: Value, invstd: Value, eps: float
) -> Value:
    wide = x.compute()
    out = (wide - _per_channel(mean.to(wide.dtype), x.rank)) * _per_channel(invstd.to(wide.dtype), x.rank)
    if weight is not None:
        out = out * _per_channel(weight.to(wide.dtype), x.rank)
    if bias is not None:
        out = out + _per_channel(bias.to(wide.dtype), x.rank)
    return out.to(x.dtype)


@RULES(aten.batch_norm_backward_reduce.default)
def _batch_norm_backward_reduce(
    b: Builder,
    grad: Value,
    x: Value,
    mean: Value,
    invstd: Value,
    weight: Value | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Value | None, ...]:
    compute, dims = compute_dtype(x.dtype), _other_dims(x)
    g = grad.to(compute)
    total = g.sum(dims)
    dot = (g * (x.to(compute) - _per_channel(mean.to(compute), x.rank))).sum(dims)
    parameter = compute if weight is None else weight.dtype
    return (
        total if input_g else None,
        dot if input_g else None,
        (dot * invstd.to(compute)).to(parameter) if weight_g else None,
        total.to(parameter) if bias_g else None,
    )


@RULES(aten.batch_norm_backward_elemt.default)
def _batch_norm_backward_elemt(
    b: Builder,
    grad: Value,
    x: Value,
    mean: Value,
    invstd: Value,
    weight: Value | None,
    sum_dy: Value,
    sum_dy_xmu: Value,
    count: Value,
) -> Value:
    compute = compute_dtype(x.dtype)
    n = count.to(compute).sum((0,))
    rstd = invstd.to(compute)
    centred = x.to(compute) - _per_channel(mean.to(compute), x.rank)
    slope = sum_dy_xmu.to(compute) / n * rstd * rstd
    scale = rstd if weight is None else rstd * weight.to(compute)
    out = grad.to(compute) - _per_channel(sum_dy.to(compute) / n, x.rank) - centred * _per_channel(slope, x.rank)
    return (out * _per_channel(scale, x.rank)).to(x.dtype)


_FEW = 64


def _gradient_dtype(x: Value, dims: Sequence[int]) -> torch.dtype:
    """Where a channel has few elements the gradient is a small difference of large terms (of two elements, all but
    eps / (var + eps) cancels). Eager computes it in double on the CPU; so do we, where it matters and costs little."""
    compute = compute_dtype(x.dtype)
    count = product([x.shape[d] for d in dims])
    few = isinstance(count, int) and count <= _FEW
    return torch.float64 if few and compute is torch.float32 and x.device.type == "cpu" else compute


def _batch_norm_grads(
    b: Builder,
    grad: Value,
    x: Value,
    weight: Value | None,
    mean: Value,
    rstd: Value,
    train: bool,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    dims, rank = _other_dims(x), x.rank
    compute = _gradient_dtype(x, dims) if train else compute_dtype(x.dtype)
    g, mean, rstd = grad.to(compute), mean.to(compute), rstd.to(compute)
    centred = x.to(compute) - _per_channel(mean, rank)
    sum_g = g.sum(dims)
    dot = (g * centred).sum(dims)
    grad_x = None
    if output_mask[0]:
        scale = rstd if weight is None else rstd * weight.to(compute)
        if train:
            n = product([x.shape[d] for d in dims])
            slope = dot / n * rstd * rstd
            grad_x = (g - _per_channel(sum_g / n, rank) - centred * _per_channel(slope, rank)) * _per_channel(
                scale, rank
            )
        else:
            grad_x = g * _per_channel(scale, rank)
        grad_x = grad_x.to(x.dtype)
    parameter = compute_dtype(x.dtype) if weight is None else weight.dtype
    grad_weight = (dot * rstd).to(parameter) if output_mask[1] else None
    grad_bias = sum_g.to(parameter) if output_mask[2] else None
    return grad_x, grad_weight, grad_bias


@RULES(aten.native_batch_norm_backward.default)
def _native_batch_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, rstd = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, _rsqrt(running_var.to(compute_dtype(x.dtype)), eps)
    return _batch_norm_grads(b, grad, x, weight, mean, rstd, train, output_mask)


@RULES("aten::batch_norm_backward.default")
def _batch_norm_backward(b: Builder, *arguments: Any) -> tuple[Value | None, ...]:
    """The arguments of native_batch_norm_backward, and last the kernel's reserve, which only that kernel reads."""
    gradients: tuple[Value | None, ...] = _native_batch_norm_backward(b, *arguments[:-1])
    return gradients


RULES.add(
    aten.cudnn_batch_norm_backward.default,
    lambda b, x, grad, weight, running_mean, running_var, save_mean, save_var, eps, reserve: _batch_norm_grads(
        b, grad, x, weight, save_mean, save_var, True, (True,) * 3
    ),
)


@RULES("aten::cudnn_batch_norm.default")
def _cudnn_batch_norm(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    out, mean, rstd, _, _ = _batch_norm_parts(b, x, weight, bias, running_mean, running_var, training, momentum, eps)
    return out, mean, rstd, b.full((0,), 0, torch.uint8, x.device)


# --- group norm ----------------------------------------------------------------------------------
@RULES(aten.native_group_norm.default)
def _group_norm(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, n: Any, c: Any, hw: Any, group: int, eps: float
) -> tuple[Value, Value, Value]:
    """Normalise each of `group` blocks of channels (Wu and He 2018)."""
    wide = x.compute()
    grouped = wide.reshape((n, group, c // group, hw))
    var, mean = b.emit(prims.var_mean, grouped, (2, 3), 0.0, True)
    rstd = _rsqrt(var, eps)
    out = ((grouped - mean) * rstd).reshape((n, c, hw))
    if weight is not None:
        out = out * weight.to(wide.dtype).unsqueeze(0, 2)
    if bias is not None:
        out = out + bias.to(wide.dtype).unsqueeze(0, 2)
    kept = _statistics_dtype(x, weight, bias)
    return (out.reshape(x.shape).to(x.dtype), mean.reshape((n, group)).to(kept), rstd.reshape((n, group)).to(kept))


@RULES(aten.native_group_norm_backward.default)
def _group_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    n: Any,
    c: Any,
    hw: Any,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    compute = compute_dtype(x.dtype)
    shape = (n, group, c // group, hw)
    g = grad.to(compute).reshape(shape)
    rstd = rstd.to(compute).reshape((n, group, 1, 1))
    x_hat = (x.to(compute).reshape(shape) - mean.to(compute).reshape((n, group, 1, 1))) * rstd
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        inner = g if weight is None else g * weight.to(compute).reshape((1, group, c // group, 1))
        out = rstd * (inner - inner.mean((2, 3), True) - x_hat * (inner * x_hat).mean((2, 3), True))
        grad_x = out.reshape(x.shape).to(x.dtype)
    parameter = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        grad_weight = (g * x_hat).sum((0, 3)).reshape((c,)).to(parameter)
    if output_mask[2]:
        grad_bias = g.sum((0, 3)).reshape((c,)).to(parameter)
    return grad_x, grad_weight, grad_bias


# --- softmax -------------------------------------------------------------------------------------
def _shifted(b: Builder, x: Value, dim: int) -> Value:
    return x - x.reduce(prims.amax, (dim,), True) if x.rank else x - x


@RULES("aten::_safe_softmax.default")
def _safe_softmax(b: Builder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax whose rows of minus infinity alone give zeros."""
    wide = x if dtype is None else x.to(dtype)
    out = _softmax(b, wide, dim, False)
    if not x.rank or _is_empty(x, x.dim(dim)):
        return out  # type: ignore[no-any-return]
    return b.where(wide.eq(-math.inf).reduce(prims.all, (x.dim(dim),), True), 0, out)


@RULES(aten._softmax.default)
def _softmax(b: Builder, x: Value, dim: int, half_to_float: Any = False) -> Value:
    out_dtype = torch.float32 if half_to_float is True else x.dtype
    wide, dim = x.compute(), x.dim(dim)
    if _is_empty(x, dim):
        return wide.to(out_dtype)
    e = _shifted(b, wide, dim).map(prims.exp)
    return (e / (e.sum((dim,), True) if x.rank else e)).to(out_dtype)


def _is_empty(x: Value, dim: int) -> bool:
    return x.rank > 0 and isinstance(x.shape[dim], int) and x.shape[dim] == 0


@RULES(aten._log_softmax.default)
def _log_softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    out_dtype = torch.float32 if half_to_float else x.dtype
    wide, dim = x.compute(), x.dim(dim)
    if _is_empty(x, dim):
        return wide.to(out_dtype)
    shifted = _shifted(b, wide, dim)
    e = shifted.map(prims.exp)
    return (shifted - (e.sum((dim,), True) if x.rank else e).map(prims.log)).to(out_dtype)


@RULES(aten._softmax_backward_data.default)
def _softmax_backward(b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    compute, dim = compute_dtype(grad.dtype), output.dim(dim)
    y = output.to(compute)
    product = grad.to(compute) * y
    total = product.sum((dim,), True) if output.rank else product
    return (product - y * total).to(input_dtype)


@RULES(aten._log_softmax_backward_data.default)
def _log_softmax_backward(b: Builder, grad: Value, output: Value, dim: int, input_dtype: torch.dtype) -> Value:
    compute, dim = compute_dtype(grad.dtype), output.dim(dim)
    g = grad.to(compute)
    total = g.sum((dim,), True) if output.rank else g
    return (g - output.to(compute).map(prims.exp) * total).to(input_dtype)


# --- negative log-likelihood ---------------------------------------------------------------------
def _class_dim(x: Value) -> int:
    return 0 if x.rank == 1 else 1


def _picked(b: Builder, x: Value, target: Value, ignore_index: int) -> tuple[Value, Value, int]:
    """(target with ignored entries set to class 0, both with the class dimension; valid mask; class dim)."""
    dim = _class_dim(x)
    target = target.to(torch.int64).unsqueeze(dim) if target.rank < x.rank else target.to(torch.int64)
    valid = target.ne(ignore_index)
    return b.where(valid, target, 0), valid, dim


def _class_weights(b: Builder, x: Value, weight: Value, safe: Value) -> Value:
    return b.emit(prims.index, weight.to(compute_dtype(x.dtype)), (safe,), False)  # type: ignore[no-any-return]


@RULES(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(
    b: Builder, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: Any
) -> tuple[Value, Value]:
    wide = x.compute()
    safe, valid, dim = _picked(b, x, target, ignore_index)
    loss = -b.emit(prims.gather, wide, dim, safe)
    scale = valid.to(wide.dtype)
    if weight is not None:
        scale = b.where(valid, _class_weights(b, x, weight, safe), 0.0)
        loss = loss * scale
    loss = b.where(valid, loss, 0.0)
    if reduction == _NONE:
        return loss.squeeze(dim).to(x.dtype), b.full((), 0, x.dtype, x.device)
    everything = tuple(range(loss.rank))
    total, weights = loss.sum(everything), scale.sum(everything)
    return (total / weights if reduction == _MEAN else total).to(x.dtype), weights.to(x.dtype)


@RULES(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    b: Builder,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: Any,
    total_weight: Value,
) -> Value:
    compute = compute_dtype(x.dtype)
    safe, valid, dim = _picked(b, x, target, ignore_index)
    g = grad.to(compute)
    if reduction == _MEAN:
        g = g / total_weight.to(compute)
    elif reduction == _NONE:
        g = g.unsqueeze(dim)
    g = -g
    if weight is not None:
        g = g * _class_weights(b, x, weight, safe)
    g = b.where(valid, g.expand(safe.shape), 0.0)
    # Every row has one class: comparing positions writes each element once and needs no scatter.
    classes = b.iota(x.shape[dim], x.device).unsqueeze(*(d for d in range(x.rank) if d != dim))
    return b.where(classes.eq(safe), g, 0.0).to(x.dtype)
