"""Layer, batch, group and weight normalisation, softmax, each with its gradient."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from primtorch import prims
from primtorch.builder import Builder, Value
from primtorch.families import Family, Trait
from primtorch.layout import contiguous_strides, product, suggested_strides, wrap_dim
from primtorch.operators.build import contiguous, strided
from primtorch.operators.reduction import vector_norm
from primtorch.operators.refusals import refuse
from primtorch.promotion import compute_dtype, result_type
from primtorch.spec import Size, TensorSpec

OP = Family("normalization")
OP.trait(
    Trait.ONE_DEVICE,
    "_log_softmax_backward_data _softmax_backward_data native_batch_norm native_group_norm native_layer_norm",
)


def _rsqrt(variance: Value, eps: float) -> Value:
    return (variance + eps).map(prims.rsqrt)


def _kept_dtype(x: Value, *parameters: Value | None) -> torch.dtype:
    """Where eager keeps mean and rstd of a normalisation: float32 for reduced precision on a GPU, and on the CPU
    where the parameters are float32; else x's dtype."""
    mixed = any(p is not None and p.dtype is not x.dtype for p in parameters)
    return x.dtype if x.device.type == "cpu" and not mixed else compute_dtype(x.dtype)


# --- layer norm ----------------------------------------------------------------------------------
def like(x: Any, dtype: torch.dtype | None = None) -> TensorSpec:
    return contiguous(x, x.shape, dtype)


def _statistics_dtype(x: Any, weight: Any) -> torch.dtype:
    """CPU keeps statistics in the input's dtype, except for mixed dtypes; CUDA in the accumulator's."""
    if x.device.type != "cpu":
        return compute_dtype(x.dtype)
    dtype: torch.dtype = x.dtype if weight is None else weight.dtype
    return dtype


@OP.formula("native_layer_norm")
def _layer_norm(x: Any, normalized_shape: Sequence[Size], weight: Any, bias: Any, eps: float) -> tuple[TensorSpec, ...]:
    lead = x.dim() - len(normalized_shape)
    if tuple(x.shape[lead:]) != tuple(normalized_shape):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected input with shape [*, "
            f"{', '.join(map(str, normalized_shape))}], "
            f"but got input of size{list(x.shape)}"
        )
    shape = (*x.shape[:lead], *(1 for _ in normalized_shape))
    statistics = contiguous(x, shape, _statistics_dtype(x, weight))
    return like(x), statistics, statistics


@OP.refuses("native_layer_norm")
def _refuse_layer_norm(x: Any, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float) -> None:
    shape = list(normalized_shape)
    refuse(not shape, "Expected normalized_shape to be at least 1-dimensional")
    for name, given in (("weight", weight), ("bias", bias)):
        refuse(
            given is not None and list(given.shape) != shape,
            lambda: f"Expected {name} to be of same shape as normalized_shape {shape}",
        )
    refuse(
        x.dim() < len(shape) or list(x.shape[x.dim() - len(shape) :]) != shape,
        lambda: f"Given normalized_shape={shape}, expected input with shape [*, {shape}], but got {list(x.shape)}",
    )


@OP.rule("native_layer_norm")
def _lower_layer_norm(
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
    kept = _kept_dtype(x, weight, bias)
    return out.to(x.dtype), mean.to(kept), rstd.to(kept)


@OP.formula("native_layer_norm_backward")
def _layer_norm_backward(
    grad: Any,
    x: Any,
    normalized_shape: Sequence[Size],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:
    return (
        like(x) if output_mask[0] else None,
        like(weight) if output_mask[1] and weight is not None else None,
        like(bias) if output_mask[2] and bias is not None else None,
    )


@OP.rule("native_layer_norm_backward")
def _lower_layer_norm_backward(
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


@OP.formula("_fused_rms_norm")
def _rms_norm(
    x: Any, normalized_shape: Sequence[Size], weight: Any, eps: float | None
) -> tuple[TensorSpec, TensorSpec]:
    lead = x.dim() - len(normalized_shape)
    dtype = x.dtype if weight is None else result_type((x, weight))
    statistics = contiguous(x, (*x.shape[:lead], *(1 for _ in normalized_shape)), compute_dtype(x.dtype))
    return contiguous(x, x.shape, dtype), statistics


@OP.rule("_fused_rms_norm?")
def _lower_rms_norm(
    b: Builder, x: Value, normalized_shape: Sequence[Any], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""
    dims = tuple(range(x.rank - len(normalized_shape), x.rank))
    wide = x.compute()
    rstd = _rsqrt((wide * wide).mean(dims, True), torch.finfo(wide.dtype).eps if eps is None else eps)
    out = wide * rstd
    if weight is not None:
        out = out * weight.to(wide.dtype)
    return out.to(x.dtype), rstd.to(_kept_dtype(x, weight))


@OP.formula("_fused_rms_norm_backward")
def _rms_norm_backward(
    grad: Any, x: Any, normalized_shape: Any, rstd: Any, weight: Any, output_mask: Sequence[bool]
) -> tuple[TensorSpec | None, ...]:
    return (like(x) if output_mask[0] else None, like(weight) if output_mask[1] and weight is not None else None)


@OP.rule("_fused_rms_norm_backward?")
def _lower_rms_norm_backward(
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
    kept = _kept_dtype(x, *parameters)
    if training:
        return mean.to(kept), rstd.to(kept)
    empty = b.full((0,), 0, kept, x.device)
    return (empty, empty) if x.device.type == "cpu" else (mean.to(kept), rstd.to(kept))


def _batch_norm_specs(x: Any, weight: Any, training: bool) -> tuple[TensorSpec, TensorSpec]:
    shape = tuple(x.shape)
    out = strided(x, shape, suggested_strides(x, shape))
    keeps = training or x.device.type != "cpu"
    dtype = _statistics_dtype(x, weight)
    return out, contiguous(x, (x.shape[1] if keeps and training else 0,), dtype)


@OP.formula("native_batch_norm", "_native_batch_norm_legit")
def _batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_specs(x, weight, training)
    return out, statistics, statistics


@OP.rule("native_batch_norm")
def _lower_native_batch_norm(
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


@OP.formula("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_specs(x, weight, training)
    return out, statistics, statistics


@OP.rule("_native_batch_norm_legit.no_stats")
def _lower_batch_norm_no_stats(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> tuple[Value, ...]:
    return _lower_native_batch_norm(b, x, weight, bias, None, None, training, momentum, eps)  # type: ignore[no-any-return]


@OP.formula("_native_batch_norm_legit_no_training")
def _batch_norm_no_training(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_specs(x, weight, False)
    return out, statistics, statistics


@OP.rule("_native_batch_norm_legit_no_training")
def _lower_batch_norm_no_training(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    return _lower_native_batch_norm(b, x, weight, bias, running_mean, running_var, False, momentum, eps)  # type: ignore[no-any-return]


@OP.formula("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_specs(x, weight, training)
    return out, statistics, statistics, like(running_mean), like(running_var)


@OP.rule("_native_batch_norm_legit_functional")
def _lower_batch_norm_functional(
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


@OP.rule("_batch_norm_with_update_functional?")
def _lower_batch_norm_with_update(
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


@OP.formula("_batch_norm_with_update", "_batch_norm_no_update")
def _batch_norm_updating(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_specs(x, weight, True)
    return out, statistics, statistics, TensorSpec((0,), (1,), torch.uint8, x.device)


@OP.rule("_batch_norm_no_update?")
def _lower_batch_norm_no_update(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    out = _lower_native_batch_norm(b, x, weight, bias, running_mean, running_var, False, momentum, eps)
    return (*out, b.full((0,), 0, torch.uint8, x.device))


# --- batch norm over several devices -----------------------------------------------------------------
@OP.rule("batch_norm_stats")
def _lower_batch_norm_stats(b: Builder, x: Value, eps: float) -> tuple[Value, Value]:
    var, mean = b.emit(prims.var_mean, x.compute(), _other_dims(x), 0.0, False)
    return mean, _rsqrt(var, eps)


@OP.rule("batch_norm_update_stats")
def _lower_batch_norm_update_stats(
    b: Builder, x: Value, running_mean: Value | None, running_var: Value | None, momentum: float
) -> tuple[Value, Value]:
    var, mean = b.emit(prims.var_mean, x.compute(), _other_dims(x), 0.0, False)
    return mean, var


@OP.rule("batch_norm_elemt")
def _lower_batch_norm_elemt(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, mean: Value, invstd: Value, eps: float
) -> Value:
    wide = x.compute()
    out = (wide - _per_channel(mean.to(wide.dtype), x.rank)) * _per_channel(invstd.to(wide.dtype), x.rank)
    if weight is not None:
        out = out * _per_channel(weight.to(wide.dtype), x.rank)
    if bias is not None:
        out = out + _per_channel(bias.to(wide.dtype), x.rank)
    return out.to(x.dtype)


@OP.rule("batch_norm_backward_reduce")
def _lower_batch_norm_backward_reduce(
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


@OP.rule("batch_norm_backward_elemt")
def _lower_batch_norm_backward_elemt(
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


@OP.formula("native_batch_norm_backward")
def _batch_norm_backward(
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:
    shape = tuple(x.shape)
    dtype = weight.dtype if weight is not None else _statistics_dtype(x, None)
    return (
        strided(x, shape, suggested_strides(x, shape)) if output_mask[0] else None,
        contiguous(x, (x.shape[1],), dtype) if output_mask[1] else None,
        contiguous(x, (x.shape[1],), dtype) if output_mask[2] else None,
    )


@OP.rule("native_batch_norm_backward")
def _lower_native_batch_norm_backward(
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


@OP.rule("batch_norm_backward?")
def _lower_batch_norm_backward(b: Builder, *arguments: Any) -> tuple[Value | None, ...]:
    """The arguments of native_batch_norm_backward, and last the kernel's reserve, which only that kernel reads."""
    gradients: tuple[Value | None, ...] = _lower_native_batch_norm_backward(b, *arguments[:-1])
    return gradients


@OP.formula("cudnn_batch_norm_backward")
def _cudnn_batch_norm_backward(x: Any, grad: Any, weight: Any, *args: Any, **kwargs: Any) -> tuple[TensorSpec, ...]:
    shape = tuple(x.shape)
    return strided(x, shape, suggested_strides(x, shape)), like(weight), like(weight)


OP.rule("cudnn_batch_norm_backward")(
    lambda b, x, grad, weight, running_mean, running_var, save_mean, save_var, eps, reserve: _batch_norm_grads(
        b, grad, x, weight, save_mean, save_var, True, (True,) * 3
    )
)


@OP.formula("cudnn_batch_norm")
def _cudnn_batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    shape = tuple(x.shape)
    statistics = contiguous(weight, (x.shape[1] if training else 0,))
    reserve = TensorSpec((0,), (1,), torch.uint8, x.device)
    return strided(x, shape, suggested_strides(x, shape)), statistics, statistics, reserve


@OP.rule("cudnn_batch_norm?")
def _lower_cudnn_batch_norm(
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
@OP.formula("native_group_norm")
def _group_norm(
    x: Any, weight: Any, bias: Any, N: Size, C: Size, HxW: Size, group: int, eps: float
) -> tuple[TensorSpec, ...]:
    statistics = contiguous(x, (N, group), _statistics_dtype(x, weight))
    strides = suggested_strides(x, tuple(x.shape)) if x.device.type == "cpu" else contiguous_strides(tuple(x.shape))
    return strided(x, x.shape, strides), statistics, statistics


@OP.rule("native_group_norm")
def _lower_group_norm(
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
    kept = _kept_dtype(x, weight, bias)
    return (out.reshape(x.shape).to(x.dtype), mean.reshape((n, group)).to(kept), rstd.reshape((n, group)).to(kept))


@OP.formula("native_group_norm_backward")
def _group_norm_backward(
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:
    like = weight if weight is not None else x
    strides = suggested_strides(x, tuple(x.shape)) if x.device.type == "cpu" else contiguous_strides(tuple(x.shape))
    return (
        strided(x, x.shape, strides) if output_mask[0] else None,
        contiguous(like, (C,)) if output_mask[1] else None,
        contiguous(like, (C,)) if output_mask[2] else None,
    )


@OP.rule("native_group_norm_backward")
def _lower_group_norm_backward(
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


def _is_empty(x: Value, dim: int) -> bool:
    return x.rank > 0 and isinstance(x.shape[dim], int) and x.shape[dim] == 0


@OP.formula("_softmax", "_log_softmax")
def _softmax(x: Any, dim: int, half_to_float: bool) -> TensorSpec:
    wrap_dim(dim, x.dim())
    shape = tuple(x.shape)
    return contiguous(x, shape, torch.float32 if half_to_float else x.dtype)


@OP.rule("_softmax")
def _lower_softmax(b: Builder, x: Value, dim: int, half_to_float: Any = False) -> Value:
    out_dtype = torch.float32 if half_to_float is True else x.dtype
    wide, dim = x.compute(), x.dim(dim)
    if _is_empty(x, dim):
        return wide.to(out_dtype)
    e = _shifted(b, wide, dim).map(prims.exp)
    return (e / (e.sum((dim,), True) if x.rank else e)).to(out_dtype)


@OP.formula("_safe_softmax")
def _safe_softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> TensorSpec:
    return contiguous(x, x.shape, dtype or x.dtype)


@OP.rule("_safe_softmax?")
def _lower_safe_softmax(b: Builder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    """Softmax whose rows of minus infinity alone give zeros."""
    wide = x if dtype is None else x.to(dtype)
    out = _lower_softmax(b, wide, dim, False)
    if not x.rank or _is_empty(x, x.dim(dim)):
        return out  # type: ignore[no-any-return]
    return b.where(wide.eq(-math.inf).reduce(prims.all, (x.dim(dim),), True), 0, out)


@OP.rule("_log_softmax")
def _lower_log_softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Value:
    out_dtype = torch.float32 if half_to_float else x.dtype
    wide, dim = x.compute(), x.dim(dim)
    if _is_empty(x, dim):
        return wide.to(out_dtype)
    shifted = _shifted(b, wide, dim)
    e = shifted.map(prims.exp)
    return (shifted - (e.sum((dim,), True) if x.rank else e).map(prims.log)).to(out_dtype)


@OP.formula("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> TensorSpec:
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


# --- weight norm ---------------------------------------------------------------------------------
def _dims_but(x: Value, dim: int) -> tuple[int, ...]:
    return tuple(d for d in range(x.rank) if d != dim)


@OP.rule("_weight_norm_interface")
def _lower_weight_norm(b: Builder, v: Value, g: Value, dim: int = 0) -> tuple[Value, Value]:
    """g * v / ||v||, the norm over all dims but `dim` (Salimans and Kingma 2016)."""
    wide = v.compute()
    norms = vector_norm(b, wide, 2.0, _dims_but(v, dim), True)
    kept = norms if v.dtype is torch.bfloat16 or v.dtype is torch.float16 else norms.to(g.dtype)
    return (wide * (g.to(wide.dtype) / norms)).to(v.dtype), kept


@OP.rule("_weight_norm_interface_backward")
def _lower_weight_norm_backward(
    b: Builder, grad: Value, v: Value, g: Value, norms: Value, dim: int
) -> tuple[Value, Value]:
    wide, w, n, scale = v.compute(), grad.compute(), norms.to(compute_dtype(v.dtype)), g.compute()
    along = (w * wide).sum(_dims_but(v, dim), True)
    grad_v = scale / n * (w - wide * (along / (n * n)))
    return grad_v.to(v.dtype), (along / n).to(g.dtype)


@OP.rule("_masked_softmax")
def _lower_masked_softmax(
    b: Builder, x: Value, mask: Value, dim: int | None = None, mask_type: int | None = None
) -> Value:
    """Softmax over the elements whose mask is false."""
    dim = x.rank - 1 if dim is None else x.dim(dim)
    if mask_type == 0:
        mask = mask.unsqueeze(0, 1)
    elif mask_type == 1:
        mask = mask.unsqueeze(1, 2)
    wide = b.where(mask.expand(x.shape), -math.inf, x.compute())
    top = wide.reduce(prims.amax, (dim,), True)
    e = (wide - b.where(top.eq(-math.inf), 0.0, top)).map(prims.exp)
    total = e.sum((dim,), True)
    return b.where(total.eq(0.0), 0.0, e / b.where(total.eq(0.0), 1.0, total)).to(x.dtype)


@OP.rule("_masked_softmax_backward")
def _lower_masked_softmax_backward(
    b: Builder, grad: Value, output: Value, mask: Value, dim: int | None = None
) -> Value:
    dim = output.rank - 1 if dim is None else output.dim(dim)
    y, g = output.compute(), grad.compute()
    g = b.where(mask.expand(grad.shape), 0.0, g)
    product = g * y
    return (product - y * product.sum((dim,), True)).to(grad.dtype)


@OP.rule("batch_norm_gather_stats_with_counts")
def _lower_gathered_statistics(
    b: Builder,
    x: Value,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: float,
    eps: float,
    counts: Value,
) -> tuple[Value, Value]:
    """Mean and rstd of the union of batches of (world,) counts with (world, C) statistics (Chan et al. 1979)."""
    wide = counts.to(mean.dtype).unsqueeze(1)
    total = wide.sum((0,))
    var = (invstd * invstd).map(prims.reciprocal) - eps
    joint = (mean * wide).sum((0,)) / total
    apart = mean - joint
    joint_var = ((var + apart * apart) * wide).sum((0,)) / total
    return joint, (joint_var + eps).map(prims.rsqrt)


@OP.rule("batch_norm_gather_stats")
def _lower_gathered_equal_statistics(
    b: Builder,
    x: Value,
    mean: Value,
    invstd: Value,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Value, Value]:
    counts = b.full((mean.shape[0],), count, mean.dtype, mean.device)
    return _lower_gathered_statistics(b, x, mean, invstd, running_mean, running_var, momentum, eps, counts)  # type: ignore[no-any-return]


# --- without a rule of their own ------------------------------------------------------------------
@OP.formula("softmax.int", "log_softmax.int")
def _softmax_as(x: Any, dim: int, dtype: torch.dtype | None = None) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape, dtype or x.dtype)
