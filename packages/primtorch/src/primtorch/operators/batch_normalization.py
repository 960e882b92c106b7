"""Batch normalisation, in one process and over several, each with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from primtorch import prims
from primtorch.arguments import Sizes, TensorLike
from primtorch.builder import Builder, Value
from primtorch.eager_kernels import Fact
from primtorch.families import Family, Trait
from primtorch.frozen import record
from primtorch.layout import (
    channels_last_strides,
    contiguous_strides,
    is_channels_last,
    is_contiguous,
    product,
    suggested_strides,
)
from primtorch.operators.build import contiguous, strided
from primtorch.operators.normalization import inverse_deviation, kept_dtype, like, statistics_dtype
from primtorch.operators.refusals import refuse
from primtorch.promotion import compute_dtype
from primtorch.samples import call, integers, listed, reals
from primtorch.spec import TensorSpec

OP = Family("batch_normalization")
OP.trait(Trait.ONE_DEVICE, "native_batch_norm")


def _per_channel(v: Value, rank: int) -> Value:
    return v.unsqueeze(0, *range(2, rank)) if rank > 1 else v


def _other_dims(x: Value) -> tuple[int, ...]:
    return (0, *range(2, x.rank))


@record
class _BatchNorm:
    """A call of ATen's batch norms: its arguments, in the order of the overloads."""

    x: Value
    weight: Value | None
    bias: Value | None
    running_mean: Value | None
    running_var: Value | None
    training: bool
    momentum: float
    eps: float

    def parts(self, b: Builder) -> tuple[Value, Value, Value, Value | None, Value | None]:
        """(output, mean, rstd, new running mean, new running variance), statistics of (C,) in the compute dtype."""
        x, wide = self.x, self.x.compute()
        dims = _other_dims(x)
        new_mean, new_var = self.running_mean, self.running_var
        if self.training:
            var, mean = b.emit_several(prims.var_mean, wide, dims, 0.0, False)
            count = product([x.shape[d] for d in dims])
            if self.running_mean is not None:
                old = self.running_mean.to(wide.dtype)
                new_mean = self._moved(old, mean).to(self.running_mean.dtype)
            if self.running_var is not None:
                old = self.running_var.to(wide.dtype)
                unbiased = var * (count / (count - 1)) if not (isinstance(count, int) and count == 1) else var
                new_var = self._moved(old, unbiased).to(self.running_var.dtype)
        else:
            assert self.running_mean is not None and self.running_var is not None
            mean, var = self.running_mean.to(wide.dtype), self.running_var.to(wide.dtype)
        rstd = inverse_deviation(var, self.eps)
        out = (wide - _per_channel(mean, x.rank)) * _per_channel(rstd, x.rank)
        return _affine(out, self.weight, self.bias).to(x.dtype), mean, rstd, new_mean, new_var

    def _moved(self, old: Value, new: Value) -> Value:
        """A running statistic a step nearer to the batch's."""
        return new * self.momentum + old * (1.0 - self.momentum)

    def saved(self, b: Builder, mean: Value, rstd: Value) -> tuple[Value, Value]:
        """The statistics as the overloads give them, for the backward."""
        kept = kept_dtype(self.x, self.weight, self.bias, self.running_mean, self.running_var)
        if self.training:
            return mean.to(kept), rstd.to(kept)
        empty = b.full((0,), 0, kept, self.x.device)
        return (empty, empty) if Fact.KEEPS_NO_STATISTICS_IN_EVAL.on(self.x.device) else (mean.to(kept), rstd.to(kept))

    def results(self, b: Builder) -> tuple[Value, Value, Value]:
        """Output and saved statistics."""
        out, mean, rstd, _, _ = self.parts(b)
        return (out, *self.saved(b, mean, rstd))

    def functional_results(self, b: Builder) -> tuple[Value | None, ...]:
        """Output, saved statistics, new running statistics."""
        out, mean, rstd, new_mean, new_var = self.parts(b)
        return (out, *self.saved(b, mean, rstd), new_mean, new_var)


def _affine(out: Value, weight: Value | None, bias: Value | None) -> Value:
    """Channels scaled and shifted."""
    if weight is not None:
        out = out * _per_channel(weight.to(out.dtype), out.rank)
    if bias is not None:
        out = out + _per_channel(bias.to(out.dtype), out.rank)
    return out


def _reserve(b: Builder, x: Value) -> Value:
    """What a kernel keeps for its own backward: nothing."""
    return b.full((0,), 0, torch.uint8, x.device)


def _batch_norm_strides(x: TensorLike, shape: Sizes) -> Sizes:
    """On the CPU, what is contiguous in a format keeps it, by rows first; sizes of 1 make a tensor so in several."""
    rows_first = Fact.BATCH_NORM_KEEPS_ROWS_FIRST.on(x.device)
    if rows_first and is_contiguous(shape, x.stride()):
        return contiguous_strides(shape)
    if rows_first and is_channels_last(shape, x.stride()):
        return channels_last_strides(shape)
    return suggested_strides(x, shape)


def _batch_norm_specs(x: TensorLike, weight: TensorLike | None, training: bool) -> tuple[TensorSpec, TensorSpec]:
    shape = tuple(x.shape)
    out = strided(x, shape, _batch_norm_strides(x, shape))
    keeps = training or not Fact.KEEPS_NO_STATISTICS_IN_EVAL.on(x.device)
    return out, contiguous(x, (x.shape[1] if keeps else 0,), statistics_dtype(x, weight))


@OP.formula("native_batch_norm", "_native_batch_norm_legit")
def _batch_norm(
    x: TensorLike,
    weight: TensorLike | None,
    bias: object,
    running_mean: object,
    running_var: object,
    training: bool,
    *rest: object,
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_specs(x, weight, training)
    return out, statistics, statistics


@OP.refuses("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
def _refuse_batch_norm(
    x: TensorLike,
    weight: TensorLike | None,
    bias: TensorLike | None,
    running_mean: TensorLike | None,
    running_var: TensorLike | None,
    *rest: object,
) -> None:
    """The kernels on the CPU read vectors."""
    for name, vector in (("weight", weight), ("bias", bias), ("mean", running_mean), ("var", running_var)):
        if vector is not None and Fact.READS_VECTORS_OF_BATCH_NORM.on(x.device):
            refuse(vector.dim() != 1, f"batch_norm: expected a vector for {name}, but got {vector.dim()} dims")


@OP.formula("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(
    x: TensorLike, weight: TensorLike | None, bias: object, training: bool, *rest: object
) -> tuple[TensorSpec, ...]:
    return _batch_norm(x, weight, bias, None, None, training)


@OP.formula("_native_batch_norm_legit_no_training")
def _batch_norm_no_training(x: TensorLike, weight: TensorLike | None, *rest: object) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_specs(x, weight, False)
    return out, statistics, statistics


@OP.formula("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: TensorLike,
    weight: TensorLike | None,
    bias: object,
    running_mean: TensorLike,
    running_var: TensorLike,
    training: bool,
    *rest: object,
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_specs(x, weight, training)
    return out, statistics, statistics, like(running_mean), like(running_var)


def _reserved(x: TensorLike, weight: TensorLike | None, training: bool) -> tuple[TensorSpec, ...]:
    """What the overloads give that also hand on a kernel's reserve, empty on the CPU."""
    out, statistics = _batch_norm_specs(x, weight, training)
    return out, statistics, statistics, TensorSpec((0,), (1,), torch.uint8, x.device)


OP.formula("_batch_norm_with_update")(lambda x, weight, *rest: _reserved(x, weight, True))
OP.formula("_batch_norm_no_update?")(lambda x, weight, *rest: _reserved(x, weight, False))
OP.formula("_batch_norm_with_update_functional?")(
    lambda x, weight, bias, mean, var, *rest: (*_reserved(x, weight, True), like(mean), like(var))
)


def _in_mode(training: bool) -> Callable[..., _BatchNorm]:
    """The call of an overload whose name says whether it trains."""
    return lambda x, weight, bias, running_mean, running_var, momentum, eps: _BatchNorm(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )


_TRAINING, _EVALUATING = _in_mode(True), _in_mode(False)
OP.rule("native_batch_norm")(lambda b, *call, **named: _BatchNorm(*call, **named).results(b))
OP.rule("_native_batch_norm_legit_functional")(
    lambda b, *call, **named: _BatchNorm(*call, **named).functional_results(b)
)
OP.rule("_native_batch_norm_legit.no_stats")(
    lambda b, x, weight, bias, *rest: _BatchNorm(x, weight, bias, None, None, *rest).results(b)
)
OP.rule("_native_batch_norm_legit_no_training")(lambda b, *call: _EVALUATING(*call).results(b))
OP.rule("_batch_norm_no_update?")(lambda b, x, *rest: (*_EVALUATING(x, *rest).results(b), _reserve(b, x)))


@OP.rule("_batch_norm_with_update_functional?")
def _lower_batch_norm_with_update(b: Builder, x: Value, *rest: object) -> tuple[Value | None, ...]:
    out, mean, rstd, new_mean, new_var = _TRAINING(x, *rest).functional_results(b)
    return out, mean, rstd, _reserve(b, x), new_mean, new_var


# --- batch norm over several devices -----------------------------------------------------------------
@OP.rule("batch_norm_stats")
def _lower_batch_norm_stats(b: Builder, x: Value, eps: float) -> tuple[Value, Value]:
    var, mean = b.emit_several(prims.var_mean, x.compute(), _other_dims(x), 0.0, False)
    return mean, inverse_deviation(var, eps)


@OP.rule("batch_norm_update_stats")
def _lower_batch_norm_update_stats(
    b: Builder, x: Value, running_mean: Value | None, running_var: Value | None, momentum: float
) -> tuple[Value, Value]:
    var, mean = b.emit_several(prims.var_mean, x.compute(), _other_dims(x), 0.0, False)
    return mean, var


@OP.rule("batch_norm_elemt")
def _lower_batch_norm_elemt(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, mean: Value, invstd: Value, eps: float
) -> Value:
    wide = x.compute()
    out = (wide - _per_channel(mean.to(wide.dtype), x.rank)) * _per_channel(invstd.to(wide.dtype), x.rank)
    return _affine(out, weight, bias).to(x.dtype)


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
    return joint, inverse_deviation(joint_var, eps)


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
    return _lower_gathered_statistics(b, x, mean, invstd, running_mean, running_var, momentum, eps, counts)


# --- gradients -----------------------------------------------------------------------------------
_FEW = 64


def _gradient_dtype(x: Value, dims: Sequence[int]) -> torch.dtype:
    """Where a channel has few elements the gradient is a small difference of large terms (of two elements, all but
    eps / (var + eps) cancels). Eager computes it in double on the CPU; so do we, where it matters and costs little."""
    compute = compute_dtype(x.dtype)
    count = product([x.shape[d] for d in dims])
    few = isinstance(count, int) and count <= _FEW
    exact = few and compute is torch.float32 and Fact.DEVIATIONS_IN_DOUBLE.on(x.device)
    return torch.float64 if exact else compute


def _batch_norm_grads(
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
    grad: TensorLike,
    x: TensorLike,
    weight: TensorLike,
    running_mean: TensorLike | None,
    running_var: TensorLike | None,
    save_mean: TensorLike | None,
    save_invstd: TensorLike | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:
    shape = tuple(x.shape)
    dtype = weight.dtype if weight is not None else statistics_dtype(x, None)
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
        mean, rstd = running_mean, inverse_deviation(running_var.to(compute_dtype(x.dtype)), eps)
    return _batch_norm_grads(grad, x, weight, mean, rstd, train, output_mask)


# Its last argument is the kernel's reserve, which only that kernel reads.
OP.formula("batch_norm_backward?")(lambda *call: _batch_norm_backward(*call[:-1]))
OP.rule("batch_norm_backward?")(lambda b, *call: _lower_native_batch_norm_backward(b, *call[:-1]))


@OP.formula("cudnn_batch_norm_backward")
def _cudnn_batch_norm_backward(
    x: TensorLike, grad: TensorLike, weight: TensorLike, *args: object, **kwargs: object
) -> tuple[TensorSpec, ...]:
    shape = tuple(x.shape)
    return strided(x, shape, suggested_strides(x, shape)), like(weight), like(weight)


OP.rule("cudnn_batch_norm_backward")(
    lambda b, x, grad, weight, running_mean, running_var, save_mean, save_var, eps, reserve: _batch_norm_grads(
        grad, x, weight, save_mean, save_var, True, (True,) * 3
    )
)


@OP.formula("cudnn_batch_norm")
def _cudnn_batch_norm(
    x: TensorLike,
    weight: TensorLike,
    bias: object,
    running_mean: object,
    running_var: object,
    training: bool,
    *rest: object,
) -> tuple[TensorSpec, ...]:
    shape = tuple(x.shape)
    statistics = contiguous(weight, (x.shape[1] if training else 0,))
    reserve = TensorSpec((0,), (1,), torch.uint8, x.device)
    return strided(x, shape, suggested_strides(x, shape)), statistics, statistics, reserve


OP.rule("cudnn_batch_norm?")(lambda b, x, *rest: (*_BatchNorm(x, *rest).parts(b)[:3], _reserve(b, x)))


# --- samples -------------------------------------------------------------------------------------
_IMAGES = reals(2, 3, 4, 5)
_AFFINE = (reals(3), reals(3))
_STATISTICS = (reals(3), reals(3, low=0.5))
_ALL = [True, True, True]
OP.samples(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional",
    call(_IMAGES, *_AFFINE, *_STATISTICS, True, 0.1, 1e-5),
)
OP.samples("_native_batch_norm_legit.no_stats", call(_IMAGES, *_AFFINE, True, 0.1, 1e-5))
OP.samples(
    "_native_batch_norm_legit_no_training _batch_norm_no_update _batch_norm_with_update "
    "_batch_norm_with_update_functional",
    call(_IMAGES, *_AFFINE, *_STATISTICS, 0.1, 1e-5),
)
OP.samples("native_batch_norm_backward", call(_IMAGES, _IMAGES, reals(3), *_STATISTICS, *_STATISTICS, True, 1e-5, _ALL))
OP.samples(
    "batch_norm_backward",
    call(_IMAGES, _IMAGES, reals(3), *_STATISTICS, *_STATISTICS, True, 1e-5, _ALL, integers(0, dtype=torch.uint8)),
)
OP.samples("cudnn_batch_norm", call(_IMAGES, *_AFFINE, *_STATISTICS, True, 0.1, 1e-5))
OP.samples(
    "cudnn_batch_norm_backward",
    call(_IMAGES, _IMAGES, reals(3), *_STATISTICS, *_STATISTICS, 1e-5, integers(0, dtype=torch.uint8)),
)
OP.samples("batch_norm_stats", call(_IMAGES, 1e-5))
OP.samples("batch_norm_elemt", call(_IMAGES, *_AFFINE, *_STATISTICS, 1e-5))
OP.samples("batch_norm_gather_stats", call(_IMAGES, reals(2, 3), reals(2, 3, low=0.5), *_STATISTICS, 0.1, 1e-5, 40))
OP.samples(
    "batch_norm_gather_stats_with_counts",
    call(_IMAGES, reals(2, 3), reals(2, 3, low=0.5), *_STATISTICS, 0.1, 1e-5, listed(20.0, 20.0)),
)
OP.samples("batch_norm_update_stats", call(_IMAGES, *_STATISTICS, 0.1))
OP.samples("batch_norm_backward_reduce", call(_IMAGES, _IMAGES, *_STATISTICS, reals(3), *_ALL))
OP.samples(
    "batch_norm_backward_elemt",
    call(_IMAGES, _IMAGES, *_STATISTICS, reals(3), *_AFFINE, listed(20, 20, dtype=torch.int32)),
)
