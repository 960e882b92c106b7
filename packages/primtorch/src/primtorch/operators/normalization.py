"""Layer, root mean square, group and weight normalisation, each with its gradient."""

# ruff: noqa: B023 -- the messages are built at once, in the iteration that fails

from __future__ import annotations

from collections.abc import Sequence

import torch

from primtorch import prims
from primtorch.arguments import Sizes, TensorLike
from primtorch.builder import Builder, Value
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Trait
from primtorch.layout import (
    contiguous_strides,
    product,
    suggested_strides,
)
from primtorch.operators.build import contiguous, strided
from primtorch.operators.reduction import vector_norm
from primtorch.operators.refusals import refuse, refuse_other_shape
from primtorch.promotion import compute_dtype, result_type
from primtorch.samples import call, reals
from primtorch.spec import Size, TensorSpec

OP = Family("normalization")
OP.trait(Trait.ONE_DEVICE, "native_group_norm native_layer_norm")


def inverse_deviation(variance: Value, eps: float) -> Value:
    """1 / sqrt(variance + eps), by element."""
    return (variance + eps).map(prims.rsqrt)


def kept_dtype(x: Value, *parameters: Value | None) -> torch.dtype:
    """Where eager keeps mean and rstd of a normalisation: float32 for reduced precision on a GPU, and on the CPU
    where the parameters are float32; else x's dtype."""
    mixed = any(p is not None and p.dtype is not x.dtype for p in parameters)
    return x.dtype if Fact.KEEPS_NARROW_STATISTICS.on(x.device) and not mixed else compute_dtype(x.dtype)


# --- layer norm ----------------------------------------------------------------------------------
def like(x: TensorLike, dtype: torch.dtype | None = None) -> TensorSpec:
    """A contiguous tensor of x's sizes."""
    return contiguous(x, x.shape, dtype)


def statistics_dtype(x: TensorLike, weight: TensorLike | None) -> torch.dtype:
    """CPU keeps statistics in the input's dtype, except for mixed dtypes; CUDA in the accumulator's."""
    if not Fact.KEEPS_NARROW_STATISTICS.on(x.device):
        return compute_dtype(x.dtype)
    return x.dtype if weight is None else weight.dtype


@OP.formula("native_layer_norm")
def _layer_norm(
    x: TensorLike, normalized_shape: Sequence[Size], weight: TensorLike, bias: TensorLike | None, eps: float
) -> tuple[TensorSpec, ...]:
    lead = x.dim() - len(normalized_shape)
    if tuple(x.shape[lead:]) != tuple(normalized_shape):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected input with shape [*, "
            f"{', '.join(map(str, normalized_shape))}], "
            f"but got input of size{list(x.shape)}"
        )
    shape = (*x.shape[:lead], *(1 for _ in normalized_shape))
    statistics = contiguous(x, shape, statistics_dtype(x, weight))
    return like(x), statistics, statistics


@OP.refuses("native_layer_norm")
def _refuse_layer_norm(
    x: TensorLike, normalized_shape: Sequence[Size], weight: TensorLike, bias: TensorLike | None, eps: float
) -> None:
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
def lower_layer_norm(
    b: Builder, x: Value, normalized_shape: Sequence[Size], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """(x - mean) * rstd * weight + bias over the last dims (Ba, Kiros, Hinton 2016)."""
    dims = tuple(range(x.rank - len(normalized_shape), x.rank))
    wide = x.compute()
    var, mean = b.emit_several(prims.var_mean, wide, dims, 0.0, True)
    rstd = inverse_deviation(var, eps)
    out = (wide - mean) * rstd
    if weight is not None:
        out = out * weight.to(wide.dtype)
    if bias is not None:
        out = out + bias.to(wide.dtype)
    kept = kept_dtype(x, weight, bias)
    return out.to(x.dtype), mean.to(kept), rstd.to(kept)


@OP.formula("native_layer_norm_backward")
def _layer_norm_backward(
    grad: TensorLike,
    x: TensorLike,
    normalized_shape: Sequence[Size],
    mean: TensorLike,
    rstd: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None,
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
    normalized_shape: Sequence[Size],
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
    x: TensorLike, normalized_shape: Sequence[Size], weight: TensorLike, eps: float | None
) -> tuple[TensorSpec, TensorSpec]:
    lead = x.dim() - len(normalized_shape)
    dtype = x.dtype if weight is None else result_type((x, weight))
    statistics = contiguous(x, (*x.shape[:lead], *(1 for _ in normalized_shape)), compute_dtype(x.dtype))
    return contiguous(x, x.shape, dtype), statistics


@OP.rule("_fused_rms_norm?")
def _lower_rms_norm(
    b: Builder, x: Value, normalized_shape: Sequence[Size], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""
    dims = tuple(range(x.rank - len(normalized_shape), x.rank))
    wide = x.compute()
    rstd = inverse_deviation((wide * wide).mean(dims, True), torch.finfo(wide.dtype).eps if eps is None else eps)
    out = wide * rstd
    if weight is not None:
        out = out * weight.to(wide.dtype)
    return out.to(x.dtype), rstd.to(kept_dtype(x, weight))


@OP.formula("_fused_rms_norm_backward")
def _rms_norm_backward(
    grad: TensorLike,
    x: TensorLike,
    normalized_shape: Sequence[Size],
    rstd: TensorLike,
    weight: TensorLike,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:
    return (like(x) if output_mask[0] else None, like(weight) if output_mask[1] and weight is not None else None)


@OP.rule("_fused_rms_norm_backward?")
def _lower_rms_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[Size],
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


# --- group norm ----------------------------------------------------------------------------------
def _group_norm_strides(x: TensorLike) -> Sizes:
    shape = tuple(x.shape)
    return suggested_strides(x, shape) if Fact.KEEPS_MEMORY_FORMATS.on(x.device) else contiguous_strides(shape)


@OP.formula("native_group_norm")
def _group_norm(
    x: TensorLike, weight: TensorLike, bias: TensorLike | None, N: Size, C: Size, HxW: Size, group: int, eps: float
) -> tuple[TensorSpec, ...]:
    statistics = contiguous(x, (N, group), x.dtype if weight is None else weight.dtype)  # on any device
    strides = _group_norm_strides(x)
    return strided(x, x.shape, strides), statistics, statistics


@OP.refuses("native_group_norm")
def _refuse_group_norm(
    x: TensorLike,
    weight: TensorLike | None,
    bias: TensorLike | None,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    eps: float,
) -> None:
    refuse(group <= 0, lambda: f"Expected num groups to be greater than 0, got {group}")
    refuse(C % group != 0, lambda: f"Expected {C} channels to be divisible by num_groups, got {group}")
    refuse_other_shape("weight", weight, (C,))
    refuse_other_shape("bias", bias, (C,))
    refuse(x.numel() != N * C * HxW, lambda: f"Expected {list(x.shape)} to have N * C * HxW elements")


@OP.rule("native_group_norm")
def _lower_group_norm(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, n: Size, c: Size, hw: Size, group: int, eps: float
) -> tuple[Value, Value, Value]:
    """Normalise each of `group` blocks of channels (Wu and He 2018)."""
    wide = x.compute()
    grouped = wide.reshape((n, group, c // group, hw))
    var, mean = b.emit_several(prims.var_mean, grouped, (2, 3), 0.0, True)
    rstd = inverse_deviation(var, eps)
    out = ((grouped - mean) * rstd).reshape((n, c, hw))
    if weight is not None:
        out = out * weight.to(wide.dtype).unsqueeze(0, 2)
    if bias is not None:
        out = out + bias.to(wide.dtype).unsqueeze(0, 2)
    kept = x.dtype if weight is None else weight.dtype
    return (out.reshape(x.shape).to(x.dtype), mean.reshape((n, group)).to(kept), rstd.reshape((n, group)).to(kept))


@OP.formula("native_group_norm_backward")
def _group_norm_backward(
    grad: TensorLike,
    x: TensorLike,
    mean: TensorLike,
    rstd: TensorLike,
    weight: TensorLike,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:
    like = weight if weight is not None else x
    strides = _group_norm_strides(x)
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
    n: Size,
    c: Size,
    hw: Size,
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


# --- weight norm ---------------------------------------------------------------------------------
def _dims_but(x: Value, dim: int) -> tuple[int, ...]:
    return tuple(d for d in range(x.rank) if d != dim)


@OP.formula("_weight_norm_interface")
def _weight_norm(v: TensorLike, g: TensorLike, dim: int = 0) -> tuple[TensorSpec, TensorSpec]:
    return contiguous(v, v.shape), like(g, compute_dtype(g.dtype))


@OP.rule("_weight_norm_interface")
def _lower_weight_norm(b: Builder, v: Value, g: Value, dim: int = 0) -> tuple[Value, Value]:
    """g * v / ||v||, the norm over all dims but `dim` (Salimans and Kingma 2016)."""
    wide = v.compute()
    norms = vector_norm(wide, 2.0, _dims_but(v, dim), True)
    return (wide * (g.to(wide.dtype) / norms)).to(v.dtype), norms.to(compute_dtype(g.dtype))


@OP.rule("_weight_norm_interface_backward")
def _lower_weight_norm_backward(
    b: Builder, grad: Value, v: Value, g: Value, norms: Value, dim: int
) -> tuple[Value, Value]:
    wide, w, n, scale = v.compute(), grad.compute(), norms.to(compute_dtype(v.dtype)), g.compute()
    along = (w * wide).sum(_dims_but(v, dim), True)
    grad_v = scale / n * (w - wide * (along / (n * n)))
    return grad_v.to(v.dtype), (along / n).to(g.dtype)


# --- samples ---------------------------------------------------------------------------------------

_ALL = [True, True, True]
OP.samples("native_group_norm", call(reals(2, 6, 4, 5), reals(6), None, 2, 6, 20, 3, 1e-5))
OP.samples(
    "native_group_norm_backward",
    call(reals(2, 6, 4, 5), reals(2, 6, 4, 5), reals(2, 3), reals(2, 3, low=0.5), reals(6), 2, 6, 20, 3, _ALL),
)
OP.samples(
    "native_layer_norm",
    call(reals(2, 3, 4), [4], reals(4), reals(4), 1e-5),
    call(reals(2, 3, 4), [3, 4], None, None, 1e-5),
)
OP.samples(
    "native_layer_norm_backward",
    call(reals(2, 3, 4), reals(2, 3, 4), [4], reals(2, 3, 1), reals(2, 3, 1, low=0.5), reals(4), reals(4), _ALL),
)
OP.samples("_fused_rms_norm", call(reals(2, 3, 4), [4], reals(4), 1e-5))
OP.samples(
    "_fused_rms_norm_backward",
    call(reals(2, 3, 4), reals(2, 3, 4), [4], reals(2, 3, 1, low=0.5), reals(4), [True, True]),
)
OP.samples("_weight_norm_interface", call(reals(3, 4), reals(3, 1)))
OP.samples("_weight_norm_interface_backward", call(reals(3, 4), reals(3, 4), reals(3, 1), reals(3, 1, low=0.5), 0))
