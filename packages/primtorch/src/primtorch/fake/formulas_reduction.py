"""Reductions, scans, softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from primtorch.fake.build import Formula, Table, contiguous
from primtorch.layout import reduced_dims, wrap_dim
from primtorch.promotion import float_of, integer_sum_dtype, real_of
from primtorch.spec import TensorSpec

TABLE = Table()


def reduced(x: Any, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> TensorSpec:
    """The output of a reduction: row-major, whatever the input's strides."""
    gone = set(dims)
    if keepdim:
        return contiguous(x, [1 if d in gone else s for d, s in enumerate(x.shape)], dtype)
    return contiguous(x, [s for d, s in enumerate(x.shape) if d not in gone], dtype)


def _full(dtype_rule: Any) -> Formula:
    def formula(x: Any, *, dtype: torch.dtype | None = None) -> TensorSpec:
        return contiguous(x, (), dtype or dtype_rule(x.dtype))

    return formula


TABLE.each("sum prod", _full(integer_sum_dtype))
TABLE.each("max min median nanmedian", _full(lambda d: d))
TABLE.each("any all", _full(lambda d: torch.uint8 if d is torch.uint8 else torch.bool))


@TABLE.op("sum.dim_IntList", "nansum")
def _sum(
    x: Any, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, dtype or integer_sum_dtype(x.dtype))


@TABLE.op("prod.dim_int")
def _prod(x: Any, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, dtype or integer_sum_dtype(x.dtype))


@TABLE.op("mean")
def _mean(x: Any, *, dtype: torch.dtype | None = None) -> TensorSpec:
    return _mean_dim(x, None, dtype=dtype)


@TABLE.op("mean.dim")
def _mean_dim(
    x: Any, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorSpec:
    out = dtype or x.dtype
    if not (out.is_floating_point or out.is_complex):
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or complex "
            f"dtype. Got: {x.dtype}"
        )
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, out)


@TABLE.op("amax", "amin")
def _amax(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, x.dtype)


@TABLE.op("any.dim", "all.dim", "any.dims", "all.dims")
def _any(x: Any, dim: Any = None, keepdim: bool = False) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, torch.uint8 if x.dtype is torch.uint8 else torch.bool)


@TABLE.op("argmax", "argmin")
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, torch.int64)


@TABLE.op("max.dim", "min.dim")
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    dims = reduced_dims(dim, x.dim())
    return reduced(x, dims, keepdim, x.dtype), reduced(x, dims, keepdim, torch.int64)


@TABLE.op("logsumexp")
def _logsumexp(x: Any, dim: Sequence[int], keepdim: bool = False) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, float_of(x.dtype))


@TABLE.op("var", "std")
def _var_all(x: Any, unbiased: bool = True) -> TensorSpec:
    return contiguous(x, (), real_of(x.dtype))


@TABLE.op("var.dim", "std.dim", "var.correction", "std.correction")
def _var(
    x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None
) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, real_of(x.dtype))


@TABLE.op("var_mean.correction", "std_mean.correction")
def _var_mean(
    x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[TensorSpec, TensorSpec]:
    dims = reduced_dims(dim, x.dim())
    return reduced(x, dims, keepdim, real_of(x.dtype)), reduced(x, dims, keepdim, x.dtype)


@TABLE.op("linalg_vector_norm")
def _vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, real_of(dtype or x.dtype))


@TABLE.op("cumsum", "cumprod")
def _cumsum(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape, dtype or integer_sum_dtype(x.dtype))


@TABLE.op("_softmax", "_log_softmax")
def _softmax(x: Any, dim: int, half_to_float: bool) -> TensorSpec:
    wrap_dim(dim, x.dim())
    shape = tuple(x.shape)
    return contiguous(x, shape, torch.float32 if half_to_float else x.dtype)


@TABLE.op("softmax.int", "log_softmax.int")
def _softmax_as(x: Any, dim: int, dtype: torch.dtype | None = None) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape, dtype or x.dtype)


@TABLE.op("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> TensorSpec:
    return contiguous(grad, grad.shape, input_dtype)


@TABLE.op("_safe_softmax")
def _safe_softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> TensorSpec:
    return contiguous(x, x.shape, dtype or x.dtype)


@TABLE.op("cummax", "cummin")
def _cummax(x: Any, dim: int) -> tuple[TensorSpec, TensorSpec]:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape), contiguous(x, x.shape, torch.int64)


@TABLE.op("logcumsumexp")
def _logcumsumexp(x: Any, dim: int) -> TensorSpec:
    wrap_dim(dim, x.dim())
    return contiguous(x, x.shape)


@TABLE.op("kthvalue")
def _kthvalue(x: Any, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return _max_dim(x, dim, keepdim)


@TABLE.op("mode")
def _mode(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return _max_dim(x, dim, keepdim)


@TABLE.op("median.dim", "nanmedian.dim")
def _median(x: Any, dim: int, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return _max_dim(x, dim, keepdim)


@TABLE.op("aminmax")
def _aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    out = reduced(x, reduced_dims(dim, x.dim()), keepdim, x.dtype)
    return out, out


@TABLE.op("count_nonzero", "count_nonzero.dim_IntList")
def _count_nonzero(x: Any, dim: Any = None) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), False, torch.int64)


@TABLE.op("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype")
def _norm(
    x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorSpec:
    return reduced(x, reduced_dims(dim, x.dim()), keepdim, real_of(dtype or x.dtype))
