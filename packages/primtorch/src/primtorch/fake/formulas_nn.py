"""Normalisation, losses, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.errors import NoFormula
from primtorch.fake.build import Formula, Table, contiguous, elementwise, strided
from primtorch.layout import contiguous_strides, dense_like, suggested_strides
from primtorch.promotion import compute_dtype, result_type
from primtorch.spec import Size, TensorSpec

TABLE = Table()


def _like(x: Any, dtype: torch.dtype | None = None) -> TensorSpec:
    return contiguous(x, x.shape, dtype)


def _statistics_dtype(x: Any, weight: Any) -> torch.dtype:
    """CPU keeps statistics in the input's dtype, except for mixed dtypes; CUDA in the accumulator's."""
    if x.device.type != "cpu":
        return compute_dtype(x.dtype)
    dtype: torch.dtype = x.dtype if weight is None else weight.dtype
    return dtype


@TABLE.op("native_layer_norm")
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
    return _like(x), statistics, statistics


@TABLE.op("native_layer_norm_backward")
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
        _like(x) if output_mask[0] else None,
        _like(weight) if output_mask[1] and weight is not None else None,
        _like(bias) if output_mask[2] and bias is not None else None,
    )


@TABLE.op("native_group_norm")
def _group_norm(
    x: Any, weight: Any, bias: Any, N: Size, C: Size, HxW: Size, group: int, eps: float
) -> tuple[TensorSpec, ...]:
    statistics = contiguous(x, (N, group), _statistics_dtype(x, weight))
    strides = suggested_strides(x, tuple(x.shape)) if x.device.type == "cpu" else contiguous_strides(tuple(x.shape))
    return strided(x, x.shape, strides), statistics, statistics


@TABLE.op("native_group_norm_backward")
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


def _batch_norm_parts(x: Any, weight: Any, training: bool) -> tuple[TensorSpec, TensorSpec]:
    shape = tuple(x.shape)
    out = strided(x, shape, suggested_strides(x, shape))
    keeps = training or x.device.type != "cpu"
    dtype = _statistics_dtype(x, weight)
    return out, contiguous(x, (x.shape[1] if keeps and training else 0,), dtype)


@TABLE.op("native_batch_norm", "_native_batch_norm_legit")
def _batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_parts(x, weight, training)
    return out, statistics, statistics


@TABLE.op("_batch_norm_with_update", "_batch_norm_no_update")
def _batch_norm_updating(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_parts(x, weight, True)
    return out, statistics, statistics, TensorSpec((0,), (1,), torch.uint8, x.device)


@TABLE.op("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_parts(x, weight, training)
    return out, statistics, statistics


@TABLE.op("_native_batch_norm_legit_no_training")
def _batch_norm_no_training(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_parts(x, weight, False)
    return out, statistics, statistics


@TABLE.op("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    out, statistics = _batch_norm_parts(x, weight, training)
    return out, statistics, statistics, _like(running_mean), _like(running_var)


@TABLE.op("cudnn_batch_norm")
def _cudnn_batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    shape = tuple(x.shape)
    statistics = contiguous(weight, (x.shape[1] if training else 0,))
    reserve = TensorSpec((0,), (1,), torch.uint8, x.device)
    return strided(x, shape, suggested_strides(x, shape)), statistics, statistics, reserve


@TABLE.op("native_batch_norm_backward")
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


@TABLE.op("cudnn_batch_norm_backward")
def _cudnn_batch_norm_backward(x: Any, grad: Any, weight: Any, *args: Any, **kwargs: Any) -> tuple[TensorSpec, ...]:
    shape = tuple(x.shape)
    return strided(x, shape, suggested_strides(x, shape)), _like(weight), _like(weight)


@TABLE.op("_fused_rms_norm")
def _rms_norm(
    x: Any, normalized_shape: Sequence[Size], weight: Any, eps: float | None
) -> tuple[TensorSpec, TensorSpec]:
    lead = x.dim() - len(normalized_shape)
    dtype = x.dtype if weight is None else result_type((x, weight))
    statistics = contiguous(x, (*x.shape[:lead], *(1 for _ in normalized_shape)), compute_dtype(x.dtype))
    return contiguous(x, x.shape, dtype), statistics


@TABLE.op("_fused_rms_norm_backward")
def _rms_norm_backward(
    grad: Any, x: Any, normalized_shape: Any, rstd: Any, weight: Any, output_mask: Sequence[bool]
) -> tuple[TensorSpec | None, ...]:
    return (_like(x) if output_mask[0] else None, _like(weight) if output_mask[1] and weight is not None else None)


@TABLE.op("embedding")
def _embedding(
    weight: Any, indices: Any, padding_idx: Size = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> TensorSpec:
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    return contiguous(weight, (*indices.shape, weight.shape[1]))


@TABLE.op("embedding_dense_backward")
def _embedding_backward(
    grad: Any, indices: Any, num_weights: Size, padding_idx: Size, scale_grad_by_freq: bool
) -> TensorSpec:
    return contiguous(grad, (num_weights, grad.shape[-1]))


@TABLE.op("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(x: Any, target: Any, weight: Any, reduction: int, ignore_index: Size) -> tuple[TensorSpec, TensorSpec]:
    shape = ()
    if reduction == 0 and x.dim() > 1:
        shape = (x.shape[0], *x.shape[2:])
    return contiguous(x, shape), contiguous(x, ())


@TABLE.op("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(grad: Any, x: Any, *args: Any, **kwargs: Any) -> TensorSpec:
    return contiguous(x, x.shape)


def _pointwise_loss(*positions: int) -> Formula:
    """A loss of elementwise parts with `reduction` 0 none, 1 mean, 2 sum."""

    def formula(x: Any, target: Any, *args: Any, reduction: int = 1, **kwargs: Any) -> TensorSpec:
        numbers = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
        how = numbers[0] if numbers else reduction
        out = elementwise((x, target), result_type((x, target)))
        return out if how == 0 else contiguous(x, (), out.dtype)

    return formula


TABLE.each("mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy", _pointwise_loss())


@TABLE.op("soft_margin_loss_backward")
def _pointwise_loss_backward(grad: Any, x: Any, target: Any, *args: Any) -> TensorSpec:
    return elementwise((x, target, grad), result_type((x, target, grad)))


@TABLE.op("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
def _row_major_loss_backward(grad: Any, x: Any, target: Any, *args: Any) -> TensorSpec:
    out = _pointwise_loss_backward(grad, x, target)
    return contiguous(out, out.shape)


@TABLE.op("binary_cross_entropy_backward")
def _bce_backward(grad: Any, x: Any, target: Any, weight: Any = None, reduction: int = 1) -> TensorSpec:
    shape = tuple(x.shape)
    return strided(x, shape, dense_like(shape, x.stride()))


@TABLE.op("mkldnn_rnn_layer")
def _mkldnn_rnn_layer(
    x: Any,
    weight0: Any,
    weight1: Any,
    weight2: Any,
    weight3: Any,
    hx: Any,
    cx: Any,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: Size,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[TensorSpec | None, ...]:
    """One direction of one layer, where no gradient is needed: then there is no workspace."""
    if train or torch.is_grad_enabled():
        raise NoFormula("aten::mkldnn_rnn_layer", reason="oneDNN alone knows the size of a workspace for gradients")
    return contiguous(x, (*x.shape[:-1], hidden_size)), _like(hx), _like(cx), None
